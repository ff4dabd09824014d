"""The tokens on which a model is looked at: ids, a text, or verify's own probe."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from llamactl.cli.prompt import read_ids, read_prompt
from llamactl.cli.runnable import Opened
from llamactl.errors import InputRefused, NotAvailable, UsageError

TOKENS = 1024  # of a text, and of the probe
MOST = 1 << 17  # of ids that are given
_ARRAYS = (".npy", ".npz", ".safetensors")
Notes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """ids, and where they are from: "passage", "ids" (made up), "text" or "given". notes: (code, message)."""

    ids: list[int]
    source: str
    notes: Notes = ()


def given(opened: Opened, tokens: str | None, text: str | None) -> Given:
    """The ids that --tokens names (none of them left out), the first of a text in the file `text`, or the probe.

    The notes of the first two say what so few tokens cannot tell. Raises UsageError, InputRefused and NotAvailable as
    the readers of prompts, arrays and tokenizers do, and check_ids.
    """
    from llamactl.net.generate import check_ids
    from llamactl.verify.probe import short

    if tokens is None and text is None:
        found = _probe(opened)
        check_ids(opened.model, found.ids)
        return found
    found = _text(opened, text) if tokens is None and text is not None else _ids(tokens or "")
    check_ids(opened.model, found.ids)
    return replace(found, notes=tuple(("probe-short", x) for x in short(opened.model, len(found.ids))))


def _ids(words: str) -> Given:
    """Ids written out, or a file of them."""
    path = os.path.expanduser(words)
    if not os.path.lexists(path) and not path.endswith(_ARRAYS):
        return Given(ids=_some(read_ids(words), "--tokens"), source="given")
    if path.endswith(_ARRAYS):
        from llamactl.verify.saved import read_ids as read_array

        ids: list[int] = read_array(path).tolist()
    else:
        try:
            ids = read_ids(read_prompt(None, path, False))
        except UsageError as e:
            raise InputRefused("tokens-format", e.message.removeprefix("--tokens: "), path=path,
                               help="a text of token ids: 1, 15043, 29892") from None
    return Given(ids=_some(ids, path), source="given")


def _some(ids: list[int], where: str) -> list[int]:
    if not 0 < len(ids) <= MOST:
        raise UsageError("usage", f"{where}: {len(ids):,} token ids, outside 1..{MOST:,}",
                         help="write --tokens 1,15043,29892")
    return ids


def _text(opened: Opened, file: str) -> Given:
    from llamactl.net.generate import positions

    ids = _tokenizer(opened).encode(read_prompt(None, file, False))
    model = opened.model
    ends = [n for n in (positions(model), model.context.usable, TOKENS) if n is not None]
    if not ids:
        raise InputRefused("text-short", "no tokens", path=file, help="give a text of some hundred words")
    return Given(ids=list(ids[: min(ends)]), source="text")


def _probe(opened: Opened) -> Given:
    """verify's own tokens: a passage through the model's tokenizer, or a stream of ids without one."""
    from llamactl.verify.probe import probe

    tokenizer: Any = None
    try:
        tokenizer = _tokenizer(opened)
    except NotAvailable as e:
        if e.code not in ("tokenizer-missing", "extra-missing"):
            raise
    found = probe(opened.model, tokenizer, TOKENS)
    return Given(ids=list(found.ids), source=found.source, notes=(("probe", found.note),) if found.note else ())


def _tokenizer(opened: Opened) -> Any:
    from llamactl.cli.running import place
    from llamactl.tokens import open_tokenizer

    model = opened.model
    return open_tokenizer(place(opened), model_type=model.model_type, vocab=model.embed.vocab)
