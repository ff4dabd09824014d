"""The files of a model folder that go along with its weights: tokenizer, chat template, settings, licence, README."""

from __future__ import annotations

import os
import re
import stat

from llamactl.checkpoint.disk import check_regular, unreadable
from llamactl.errors import InputRefused

MAX_BESIDE_BYTES = 256_000_000

_NAMES = frozenset((
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
    "chat_template.jinja", "chat_template.json", "generation_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json", "processor_config.json",
))
# What people name with more or less care: LICENSE, LICENCE.md, License-Llama.txt, NOTICE, USE_POLICY.md, README.md
_TEXTS = re.compile(r"(README|LICEN[SC]E|NOTICE|COPYING|USE_POLICY)([-_. ][^/]*)?", re.IGNORECASE)
_PLAIN = ("", ".md", ".txt", ".rst", ".pdf", ".html")
_RANKS = ".tiktoken"


def carried(folder: str) -> list[str]:
    """The names of these files in `folder`, sorted; each is a regular file, or a link that may be followed.

    Folders of such a name (LICENSES/) are left where they are. Errors: InputRefused beside-too-large for more than
    256 MB, and those of check_regular: dangling-link, link-outside, not-a-file, link-loop, io-permission, io-error;
    NotAvailable not-found for no such folder.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError as e:
        raise unreadable(folder, e) from None
    return [name for name in names if goes_along(name) and _is_sound(os.path.join(folder, name), folder)]


def goes_along(name: str) -> bool:
    """Whether a file of this name belongs to the model though no weights are in it. Dot files never do."""
    if name in _NAMES or (name.endswith(_RANKS) and not name.startswith(".")):
        return True
    return _TEXTS.fullmatch(name) is not None and os.path.splitext(name)[1].lower() in _PLAIN


def _is_sound(path: str, folder: str) -> bool:
    """Whether `path` is a file that can be copied; False for a folder. Errors: see `carried`."""
    try:
        info = os.stat(path)
    except OSError as e:
        raise unreadable(path, e) from None
    if stat.S_ISDIR(info.st_mode):
        return False
    check_regular(path, inside=folder)
    if info.st_size > MAX_BESIDE_BYTES:
        raise InputRefused("beside-too-large", f"{info.st_size:,} bytes; at most {MAX_BESIDE_BYTES:,} are carried",
                           path=path, help="move the file out of the folder")
    return True
