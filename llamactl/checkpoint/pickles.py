"""PyTorch's files before torch: which of a folder are the model, and whether each is a zip that may be unpickled.

A file must be a zip whose entries are stored as they are; the unpickling itself is net.weights_pickle's. Nothing here
imports torch, so that what is malformed is refused before its import has even begun.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Sequence
from typing import BinaryIO

from llamactl.checkpoint.disk import check_regular, looks_like, open_regular
from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused
from llamactl.spec.jsontext import read_json

MAX_ENTRIES = 1 << 17
MAX_DIRECTORY_BYTES = 32_000_000  # of the zip; an entry takes some 100
MAX_PICKLE_BYTES = 32_000_000  # of the names and shapes; 100,000 tensors take some 20 MB
MAX_FILES = 10_000
_PICKLES = (".bin", ".pt", ".pth")
_BIN, _BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_NO_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args", ".")
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_PICKLE = "/data.pkl"
SAFETENSORS = "save the weights as safetensors"


def check_pickle(path: str, *, inside: str | None = None) -> int:
    """The size of a file that torch.save wrote. Errors (InputRefused): pickle-format, pickle-unsafe, lfs-pointer and
    the like, and those of disk.open_regular.
    """
    file, size = open_regular(path, inside=inside)
    with file:
        _check_zip(file, size, path)
    return size


def pickle_files(folder: str) -> list[str]:
    """The pickles that are the model: by index, else pytorch_model.bin, else the only one there is."""
    names = sorted(n for n in os.listdir(folder) if n.endswith(_PICKLES) and not n.startswith(_NO_WEIGHTS))
    index = os.path.join(folder, _BIN_INDEX)
    if os.path.lexists(index):
        shards = _indexed(index)
        absent = [s for s in shards if not os.path.exists(os.path.join(folder, s))]
        if absent:
            raise InputRefused("shard-missing", f"missing: {len(absent):,} of {len(shards):,} files that the index "
                               f"names: {', '.join(map(quote, absent[:20]))}", path=folder,
                               help="download the missing files; a part of a model is never read")
        return [os.path.join(folder, s) for s in shards]
    if _BIN in names:
        return [os.path.join(folder, _BIN)]
    if len(names) > 1:
        raise InputRefused("weights-ambiguous", f"{len(names)} pickles, and no index says which belong together: "
                           f"{', '.join(map(quote, names[:20]))}", path=folder, help="keep one copy of the weights")
    return [os.path.join(folder, n) for n in names]


def _indexed(index: str) -> list[str]:
    """The files that a pytorch_model.bin.index.json names: plain names inside the folder."""
    check_regular(index, inside=os.path.dirname(index))
    data = read_json(index)
    named = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(named, dict) or not named or not all(isinstance(v, str) for v in named.values()):
        raise InputRefused("index-schema", "no weight_map: which file holds which tensor is unknown", path=index,
                           help="download the index again")
    shards = sorted(set(named.values()))
    bad = [s for s in shards if os.path.basename(s) != s or "\\" in s or "\0" in s or not s.endswith(_PICKLES)]
    if bad or len(shards) > MAX_FILES:
        what = f"weight_map names {quote(bad[0])}" if bad else f"weight_map names {len(shards):,} files"
        raise InputRefused("index-path", what, path=index, help="files are *.bin inside the model folder")
    return shards


def unsafe(said: str, path: str) -> InputRefused:
    """The error for what torch's restricted unpickler said."""
    named = re.search(r"GLOBAL ([\w.]+)", said) or re.search(r"(?:class|type) ([\w.]+\.[\w.]+)", said)
    if named is None:
        line = next((x for x in said.splitlines() if "nsupported" in x or "error:" in x), said[:200])
        return InputRefused("pickle-unsafe", f"the restricted unpickler refuses it: {line.strip()[:200]}", path=path,
                            help=SAFETENSORS)
    return InputRefused("pickle-unsafe", f"it asks for {named[1]}, which no weights need; such a file could run any "
                        "program, so it is not read", path=path, help=f"{SAFETENSORS} where you trust the file")


def _check_zip(file: BinaryIO, size: int, path: str) -> None:
    """torch's zip format, every entry stored as it is, and nothing so large that reading it is the attack."""
    head = file.read(512)
    if not head.startswith(b"PK\x03\x04"):
        if re.match(rb"\x80[\x02-\x05]", head):
            raise InputRefused("pickle-format", "a pickle in the format before torch 1.6; it cannot be mapped, and its "
                               "sizes cannot be checked first", path=path,
                               help=f"load and torch.save it again where you trust it, or {SAFETENSORS}")
        code, what, help = looks_like(head) or (None, "not a file that torch.save writes (a zip)", SAFETENSORS)
        raise InputRefused(code or "pickle-format", what, path=path, help=help)
    directory = _directory_bytes(file, size)
    if directory is None or directory > MAX_DIRECTORY_BYTES:
        what = "a zip without its end: cut short" if directory is None else f"a zip directory of {directory:,} bytes"
        raise InputRefused("pickle-format", what, path=path, help="download the file again")
    try:
        with zipfile.ZipFile(file) as z:
            wrong = _wrong(z.infolist(), size)
            pickled = b"" if wrong else z.read(next(e for e in z.infolist() if e.filename.endswith(_PICKLE)))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, EOFError, UnicodeError) as e:
        raise InputRefused("pickle-format", f"a damaged zip: {e}", path=path, help="download the file again") from None
    if wrong:
        raise InputRefused("pickle-format", wrong, path=path, help=SAFETENSORS)
    if b"\nbytearray\n" in pickled:  # torch allows it, and it takes as much memory as a number in the file says
        raise unsafe("GLOBAL bytearray", path)


def _wrong(entries: Sequence[zipfile.ZipInfo], size: int) -> str | None:
    """What keeps a zip of these entries, in a file of `size` bytes, from being read; None if nothing does."""
    if len(entries) > MAX_ENTRIES:
        return f"{len(entries):,} entries; at most {MAX_ENTRIES:,} are read"
    for e in entries:
        if e.compress_type != zipfile.ZIP_STORED or e.compress_size != e.file_size or e.flag_bits & 1:
            return f"{quote(e.filename)} is compressed or encrypted; torch.save stores entries as they are"
        if e.filename.endswith(".pkl") and e.file_size > MAX_PICKLE_BYTES:
            return f"{quote(e.filename)} has {e.file_size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read"
    if sum(e.file_size for e in entries) > size:
        return f"its entries take {sum(e.file_size for e in entries):,} bytes, the file has {size:,}"
    pickles = sum(e.filename.endswith(_PICKLE) for e in entries)
    return None if pickles == 1 else f"a zip with {pickles:,} data.pkl; torch.save writes one"


def _directory_bytes(file: BinaryIO, size: int) -> int | None:
    """Bytes of the zip's directory as its end record says them, None without one."""
    tail_bytes = min(size, 65_535 + 22 + 20)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    at = tail.rfind(_END)
    if at < 0 or at + 16 > len(tail):
        return None
    found = int.from_bytes(tail[at + 12 : at + 16], "little")
    if tail[max(at - 20, 0) : at].startswith(_LOCATOR64):
        file.seek(min(int.from_bytes(tail[at - 12 : at - 4], "little"), size))
        record = file.read(56)
        if not record.startswith(_END64):
            return None
        found = int.from_bytes(record[40:48], "little")
    file.seek(0)
    return found
