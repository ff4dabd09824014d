"""Which weights of a model folder a loader opens, and what they hold; headers only.

The order: `model.safetensors.index.json`, else `model.safetensors`, else the other *.safetensors files, if they are one
file or one full set of numbered shards. Files whose name starts with a dot are never weights (macOS leaves `._` twins).
One copy is read and counted, however many lie there; a note says which. The headers are the truth: what the index says
beside them is checked against them, both ways.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from llamactl.checkpoint.disk import unreadable
from llamactl.checkpoint.index import INDEX, Index, read_index
from llamactl.checkpoint.safetensors import SafetensorsHeader, StoredTensor, quote, read_header
from llamactl.errors import InputRefused, LlamactlError, NotAvailable

SINGLE = "model.safetensors"

_SHARD = re.compile(r"(.*?)[-_.]?([0-9]{1,6})-of-([0-9]{1,6})\.safetensors", re.DOTALL)
_PICKLE = (".bin", ".pth", ".pt", ".ckpt")
REFERENCE = "llamactl-reference.safetensors"  # logits recorded for verify, which lie beside the weights
_ADAPTER = "adapter_"
_TRAINING = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")  # torch.save, but no weights
_OTHER = (".gguf", ".h5", ".msgpack", ".onnx")

Warnings = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWeights:
    """The weights of one model. tensors: every tensor by name, stored once. warnings: (code, message).

    folder: where links may lead inside; None for a single file or one that is not on this disk. index: as it was read;
    None without one. copies: files passed over that look like the same weights; orphans: shards that the index ignores.
    """

    path: str
    headers: tuple[SafetensorsHeader, ...]
    tensors: dict[str, StoredTensor]
    warnings: Warnings = ()
    folder: str | None = None
    index: Index | None = None
    copies: tuple[str, ...] = ()
    orphans: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without the headers."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def elements(self) -> int:
        """Stored elements of all tensors; of a packed format these are not yet the model's parameters."""
        return sum(t.elements for t in self.tensors.values())

    @property
    def bytes_by_dtype(self) -> dict[str, int]:
        """Bytes by stored dtype, the largest first."""
        sums: dict[str, int] = {}
        for t in self.tensors.values():
            sums[t.dtype] = sums.get(t.dtype, 0) + t.nbytes
        return dict(sorted(sums.items(), key=lambda item: (-item[1], item[0])))


def read_folder(path: str | os.PathLike[str]) -> FolderWeights:
    """Find, read and check the weights of the model folder at `path`.

    Errors: NotAvailable not-found; InputRefused not-a-folder, no-weights, weights-format (only pickles and the like),
    weights-ambiguous, shard-missing (all of them at once), index-… (see index.py), index-mismatch, index-duplicate, and
    those of safetensors.read_header.
    """
    folder = os.fspath(path)
    names = _list(folder)
    if INDEX in names:
        return _read_by_index(folder, names, read_index(folder))
    files = _choose(folder, names)
    found = join(folder, _headers(folder, files))
    copies = _copies(folder, names, files, also=_candidates(names))
    warnings = found.warnings + _said_copies(files, copies)
    if len(files) > 1:
        warnings += (("index-missing", f"no {INDEX}: {len(files)} numbered shards are read as one model"),)
    if files[0].startswith(_ADAPTER):
        warnings += (("weights-adapter", f"{quote(files[0])} is an adapter; the model it changes is not here"),)
    return replace(found, warnings=warnings, folder=folder, copies=copies)


def read_file(path: str | os.PathLike[str]) -> FolderWeights:
    """The weights of one .safetensors file, whatever stands beside it. Errors: those of safetensors.read_header."""
    header = read_header(path)
    return join(header.path, [header])


def join(path: str, headers: Sequence[SafetensorsHeader], index: Index | None = None,
         shards: Sequence[str] = ()) -> FolderWeights:
    """Headers as the weights of one model, or InputRefused index-duplicate, index-mismatch. shards: by the index."""
    tensors = _together(path, headers)
    warnings = _header_notes(headers)
    if index is not None:
        _check_against(index, shards, headers, os.path.join(path, INDEX))
        warnings = index.warnings + warnings + _against(index, tensors)
    return FolderWeights(path=path, headers=tuple(headers), tensors=tensors, warnings=warnings, index=index)


def _read_by_index(folder: str, names: list[str], index: Index) -> FolderWeights:
    shards = index.shards
    missing = [f"{quote(s)} ({why})" for s in shards if (why := _missing(os.path.join(folder, s)))]
    if len(missing) == len(shards):
        return _read_despite(folder, names, index, missing)
    if missing:
        raise _missing_shards(folder, f"{len(missing)} of {len(shards)} shards that the index names", missing)
    found = join(folder, _headers(folder, shards), index, shards)
    warnings = found.warnings
    orphans = tuple(n for n in _candidates(names) if n not in set(shards) and not _is_copy(n))
    if orphans:
        warnings += (("index-orphan", f"no tensor of the index is in {_some(map(quote, orphans))}: not read"),)
    copies = _copies(folder, names, shards)
    return replace(found, warnings=warnings + _said_copies(shards, copies), folder=folder, copies=copies,
                   orphans=orphans)


def _check_against(index: Index, shards: Sequence[str], headers: Sequence[SafetensorsHeader], path: str) -> None:
    """Refuse an index that names a tensor which its shard lacks."""
    at = {t.name: s for s, h in zip(shards, headers, strict=True) for t in h.tensors}
    lost = [f"{quote(k)} in {quote(s)}" for k, s in index.weight_map.items() if at.get(k) != s]
    if lost:
        raise InputRefused("index-mismatch", f"tensors that the index names and its shard does not hold: {_some(lost)}",
                           path=path, help="the index is of another build: download index and shards together")


def _read_despite(folder: str, names: list[str], index: Index, absent: list[str]) -> FolderWeights:
    """Read the weights beside an index none of whose shards is there: only if they hold every tensor it names."""
    none = f"none of the {len(absent)} shards that the index names is here"
    try:
        files = _choose(folder, names)
    except LlamactlError:
        here = _some(map(quote, _candidates(names))) or "no other .safetensors file"
        raise _missing_shards(folder, f"{none} (here: {here})", absent) from None
    found = join(folder, _headers(folder, files))
    here = _some(map(quote, files))
    lost = len(index.weight_map.keys() - found.tensors.keys())
    if lost:
        raise _missing_shards(folder, f"{none}, and {lost:,} of its tensors are not in {here} either", absent)
    stale = ("index-stale", f"the index is of another build: it names {_some(map(quote, index.shards))}, none of them "
                            f"here; read instead: {here}, where all its tensors are")
    warnings = (*index.warnings, stale, *found.warnings)
    copies = _copies(folder, names, files, also=_candidates(names))
    return replace(found, warnings=warnings + _said_copies(files, copies), folder=folder, index=index, copies=copies)


def _headers(folder: str, files: Iterable[str]) -> list[SafetensorsHeader]:
    return [read_header(os.path.join(folder, f), inside=folder) for f in files]


def _together(path: str, headers: Iterable[SafetensorsHeader]) -> dict[str, StoredTensor]:
    """The tensors of all headers by name; none may stand in two files."""
    tensors: dict[str, StoredTensor] = {}
    twice = []
    for header in headers:
        for t in header.tensors:
            if t.name in tensors:
                twice.append(quote(t.name))
            tensors[t.name] = t
    if twice:
        raise InputRefused("index-duplicate", f"tensors that stand in more than one shard: {_some(twice)}", path=path,
                           help="keep the shards of one build only")
    return tensors


def _choose(folder: str, names: list[str]) -> list[str]:
    """The weight files of a folder whose index is absent or of no use."""
    if SINGLE in names:
        return [SINGLE]
    found = _candidates(names)
    if not found:
        raise _no_weights(folder, names)
    found = [n for n in found if not _is_copy(n) and not n.startswith(_ADAPTER)] or found
    shards = [m for n in found if (m := _SHARD.fullmatch(n))]
    if len(found) == 1 and not shards:
        return found
    numbers = {int(m[2]): m[0] for m in shards}
    sets = {(m[1], int(m[3])) for m in shards}
    if len(shards) != len(found) or len(sets) != 1 or len(numbers) != len(found):
        raise _ambiguous(folder, found)
    total = int(shards[0][3])
    start = 0 if 0 in numbers else 1  # old converters count from 0
    if max(numbers) >= total + start:
        raise _ambiguous(folder, found)
    if len(numbers) < total:
        m, width = shards[0], len(shards[0][2])
        gaps = (i for i in range(start, total + start) if i not in numbers)
        absent = [quote(f"{m[0][: m.start(2)]}{i:0{width}}{m[0][m.end(2) :]}") for i in islice(gaps, 100)]
        count = total - len(numbers)
        raise _missing_shards(folder, f"{count:,} of {total:,} shards, as their names count them", absent, count=count)
    return [numbers[i] for i in sorted(numbers)]


def _against(index: Index, tensors: dict[str, StoredTensor]) -> Warnings:
    """What the index says wrongly about tensors that are all there."""
    warnings: Warnings = ()
    extra = [quote(k) for k in tensors if k not in index.weight_map]
    if extra:
        warnings += (("index-unmapped", f"tensors in the shards that the index does not list: {_some(extra)}"),)
    total = sum(t.nbytes for t in tensors.values())
    if index.total_size is not None and index.total_size != total:
        said = f"{index.total_size:,}" if isinstance(index.total_size, int | float) else "no number"
        warnings += (("index-total", f"total_size says {said} bytes, the tensors take {total:,}"),)
    return warnings


def _copies(folder: str, names: list[str], read: Sequence[str], *, also: Iterable[str] = ()) -> tuple[str, ...]:
    """Files in which the same weights seem to lie once more. also: other files passed over."""
    passed = {n for n in names if _is_copy(n) or _is_pickle(n) or n.endswith(_OTHER)} | set(also)
    others = sorted(passed - set(read))
    try:
        if any(n.endswith((*_PICKLE, ".safetensors")) for n in os.listdir(os.path.join(folder, "original"))):
            others.append("original/")
    except OSError:
        pass  # it is not read anyway
    return tuple(others)


def _said_copies(read: Sequence[str], others: Sequence[str]) -> Warnings:
    if not others:
        return ()
    what = quote(read[0]) if len(read) == 1 else f"{len(read)} shards ({quote(read[0])} and on)"
    return (("weights-copies", f"read: {what}; not read, not counted: {_some(map(quote, others))}"),)


def _candidates(names: list[str]) -> list[str]:
    return [n for n in names if n.endswith(".safetensors") and not n.startswith(".") and n != REFERENCE]


def _is_copy(name: str) -> bool:
    """Whether a name is that of a whole second copy: the single file, or the original layout of its makers."""
    return name == SINGLE or (name.startswith("consolidated") and name.endswith(".safetensors"))


def _is_pickle(name: str) -> bool:
    return name.endswith(_PICKLE) and not name.startswith((".", *_TRAINING))


def _missing(path: str) -> str | None:
    """Why there is no shard at `path`; None if something is there that can be tried."""
    try:
        mode = os.stat(path).st_mode
    except PermissionError:
        return None
    except OSError:
        return f"a link to {os.readlink(path)}, which leads to no file" if os.path.islink(path) else "not there"
    return "a folder" if stat.S_ISDIR(mode) else None


def _list(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except NotADirectoryError:
        raise InputRefused("not-a-folder", "not a folder", path=folder) from None
    except (OSError, ValueError) as e:
        error = unreadable(folder, e)
        raise NotAvailable(error.code, "no such folder", path=folder) if error.code == "not-found" else error from None


def _header_notes(headers: Iterable[SafetensorsHeader]) -> Warnings:
    return tuple((code, f"{os.path.basename(h.path)}: {text}") for h in headers for code, text in h.notes)


def _some(items: Iterable[str], *, count: int | None = None, room: int = 1500) -> str:
    """As many items as fit into one line, and how many more of `count` there are."""
    items = list(items)
    shown, used = 0, 0
    while shown < len(items) and (used := used + len(items[shown]) + 2) <= room:
        shown += 1
    more = (len(items) if count is None else count) - shown
    return ", ".join(items[:shown]) + (f" and {more:,} more" if more else "")


def _missing_shards(folder: str, what: str, absent: list[str], *, count: int | None = None) -> InputRefused:
    return InputRefused("shard-missing", f"missing: {what}: {_some(absent, count=count)}", path=folder,
                        help="download the missing files; a part of a model is never read")


def _ambiguous(folder: str, found: list[str]) -> InputRefused:
    what = f"{len(found)} weight files, and no index says which belong together: {_some(map(quote, found))}"
    return InputRefused("weights-ambiguous", what, path=folder, help=f"keep one copy, or add {SINGLE} or {INDEX}")


def _no_weights(folder: str, names: list[str]) -> InputRefused:
    pickles = [n for n in names if _is_pickle(n)]
    others = pickles or [n for n in names if n.endswith(_OTHER) and not n.startswith(".")]
    if not others:
        return InputRefused("no-weights", "no weights: no .safetensors file in this folder", path=folder,
                            help="download the weights, or ask for what config.json alone can tell")
    what = "only PyTorch pickles" if pickles else "no safetensors, only"
    return InputRefused("weights-format", f"{what} ({_some(map(quote, others))}); a folder is read from safetensors",
                        path=folder, help="save the model as safetensors, or name a .gguf file itself")
