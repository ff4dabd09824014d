"""A look at every stored tensor without running the model: what is broken, what was never loaded, what is there twice.

    account -> units -> scan -> findings: of each tensor alone (here), and beside the others (suspects.py)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from statistics import median

from llamactl.analysis.verification import Finding, Inventory
from llamactl.checkpoint.account import Account, account
from llamactl.checkpoint.files import Files, Part
from llamactl.checkpoint.held import FLOATS, Held
from llamactl.net.differing import Difference
from llamactl.spec.dtype import find_dtype
from llamactl.spec.model import Model
from llamactl.spec.naming import Rule, Stored
from llamactl.verify.scan import Facts, merged, scan
from llamactl.verify.suspects import Look, Unit, duplicates, norms, plain

SHOWN = 20  # findings of one code
NAMES_DTYPE = ("hf", "lesson")  # layouts whose config says what the weights are stored in
LEVELS = ("error", "warning", "note")
TABLES = ("embed.weight", "head.weight")
HANDFUL = 8  # rows: tokens without any training may share one
FP16_MAX = 65504.0


def take(path: str, model: Model, rules: Sequence[Rule], files: Files, *, layout: str,
         ignored: Sequence[tuple[str, str]] = (), seen: Callable[[int], None] = lambda _: None) -> Inventory:
    """Read all of `files`, which lie at `path`, once. rules, ignored: as for account; seen: told the bytes read.

    norm_mean is of the weights as they are stored. Findings come errors first, SHOWN of a kind with the number of the
    rest. Errors: those of account.account, and of reading.
    """
    found = account(path, files.tensors, model, rules, layout=layout, ignored=ignored, packed=layout != "gguf")
    looks = tuple(_looks(files, found, seen))
    word, head = _head(model, files, found, looks)
    findings = [*(Finding(code=code, level="warning", message=text) for code, text in found.warnings), *head,
                *_dtypes(model, files, found, layout), *_broken(looks), *_rows(looks), *_wide(looks),
                *plain(looks), *norms(looks, model),
                *duplicates(looks, {found.at[n][1] for n in TABLES if n in found.at})]
    means = [x.facts.mean for x in looks if x.unit.norm and x.facts.mean is not None]
    held = files.tensors.values()
    return Inventory(
        path=path, layout=layout, tensors=len(files.tensors), parameters=model.total(), dtypes=_elements(held),
        head=word, norm_mean=(min(means), median(means), max(means)) if means else None,
        nan=sum(x.facts.nan for x in looks), inf=sum(x.facts.inf for x in looks), findings=tuple(_shown(findings)))


def _looks(files: Files, found: Account, seen: Callable[[int], None]) -> Iterator[Look]:
    """Every stored tensor but what is known to be no weight, the entries of a stack one by one."""
    of = {at: stored for stored, at in found.at.values()}
    for name, held in files.tensors.items():
        if name in found.ignored:  # masks hold infinities, and nobody reads them
            seen(held.nbytes)
            continue
        for unit in _units(held, of.get(name), name in found.left_out or name in found.strangers):
            yield Look(unit, _read(files, unit, seen))


def _units(held: Held, stored: Stored | None, beside: bool) -> Iterator[Unit]:
    of = stored.of if stored else ()
    entries = sorted({t.e for t in of}) if stored is not None and stored.rule.stacked else None
    if entries is None or len(entries) != held.shape[0]:
        yield Unit(held=held, shape=held.shape, of=of, rule=stored.rule if stored else None, beside=beside)
        return
    for n, e in enumerate(entries):
        assert stored is not None
        yield Unit(held=held, shape=held.shape[1:], of=tuple(t for t in of if t.e == e), rule=stored.rule,
                   beside=beside, entry=n)


def _read(files: Files, unit: Unit, seen: Callable[[int], None]) -> Facts:
    held, name = unit.held, unit.held.name
    parts = files.parts(name)
    if parts:
        cols = prod(held.shape[1:])
        pieces = []
        for part in parts:
            with files.view(part.key) as data:
                pieces.append((scan(data, held.dtype, seen, sums=unit.norm), _moved(part, cols)))
        return merged(pieces)
    table = any(t.name in TABLES and t.shape == held.shape for t in unit.of)
    with files.view(name) as data:
        if unit.entry is None:
            return scan(data, held.dtype, seen, sums=unit.norm, rows=held.shape[0] if table else 0)
        nbytes = len(data) // held.shape[0]
        with data[unit.entry * nbytes : (unit.entry + 1) * nbytes] as one:
            return scan(one, held.dtype, seen, sums=unit.norm)


def _moved(part: Part, cols: int) -> Callable[[int], int]:
    """A flat index in a part -> that in the whole, which has `cols` columns."""
    return lambda i: (part.row + i // part.cols) * cols + part.col + i % part.cols


def _broken(looks: Iterable[Look]) -> Iterator[Finding]:
    for u, f in looks:
        for code, count, first in (("nan-values", f.nan, f.first_nan), ("inf-values", f.inf, f.first_inf)):
            if not count or first is None:
                continue
            what = "nan" if code == "nan-values" else "infinite"
            text = f"{count:,} of {f.elements:,} values {'is' if count == 1 else 'are'} {what}, the first at " \
                   f"{u.index(first)} (value {first:,}{u.words})"
            yield Finding(code=code, level="warning" if u.beside else "error", tensor=u.held.name,
                          message=text + (", in a tensor that is not used" if u.beside else ""))
    unread = [u.held for u, f in looks if not f.read and not u.beside]
    if unread:
        kinds = ", ".join(sorted({h.dtype for h in unread}))
        yield Finding(code="values-not-read", level="note", tensor=unread[0].name,
                      message=f"the values of {len(unread):,} tensors are not looked at: {kinds}")


def _rows(looks: Iterable[Look]) -> Iterator[Finding]:
    for u, f in looks:
        what = "the token embedding" if any(t.name == "embed.weight" for t in u.of) else "the head"
        if f.zero_rows and not f.zero:
            yield Finding(code="zero-rows", level="note", tensor=u.held.name, message=f"{f.zero_rows[0]:,} of "
                          f"{u.shape[0]:,} rows of {what} are zero, the first is row {f.zero_rows[1]:,}")
        if f.twins and f.twins[0] > HANDFUL:
            (count, (a, b)) = f.twins
            yield Finding(code="duplicate-rows", level="note", tensor=u.held.name, message=f"{count:,} of "
                          f"{u.shape[0]:,} rows of {what} repeat another, the first is row {b:,} as row {a:,}")


def _wide(looks: Iterable[Look]) -> Iterator[Finding]:
    over = [(f.absmax, u.held.name) for u, f in looks if u.held.dtype != "F16" and f.absmax > FP16_MAX]
    if over:
        most, name = max(over)
        yield Finding(code="beyond-fp16", level="note", tensor=name, message=f"{len(over):,} "
                      f"tensor{'s hold' if len(over) > 1 else ' holds'} values beyond fp16's {FP16_MAX:,.0f}, the "
                      f"largest is {most:,.6g}")


def _elements(held: Iterable[Held]) -> tuple[tuple[str, int], ...]:
    """(dtype, elements), most first."""
    by: Counter[str] = Counter()
    for h in held:
        by[h.dtype] += h.elements
    return tuple(sorted(by.items(), key=lambda item: (-item[1], item[0])))


def _dtypes(model: Model, files: Files, found: Account, layout: str) -> Iterator[Finding]:
    if layout not in NAMES_DTYPE:
        return
    by = _elements(files.tensors[n] for n in {at for _, at in found.at.values()})
    if not by:
        return
    most = find_dtype(by[0][0])
    if model.dtype is not None and most is not None and most.name != model.dtype:
        yield Finding(code="dtype-differs", level="warning", message=f"the config says {model.dtype}, most of the "
                      f"weights are {most.name}")
    if len(by) > 1:
        said = ", ".join(f"{n:,} elements in {dtype}" for dtype, n in by)
        yield Finding(code="mixed-dtypes", level="note", message=f"the weights are stored in {len(by)} dtypes: {said}")


def _head(model: Model, files: Files, found: Account, looks: Sequence[Look]) -> tuple[str, list[Finding]]:
    """(the head in a few words, what is odd about it)."""
    name = found.twin if model.tied else found.at["head.weight"][1] if "head.weight" in found.at else None
    if name is None or "embed.weight" not in found.at:
        return "tied" if model.tied else "untied", []
    same = _same(files, name, found.at["embed.weight"][1], looks)
    if not model.tied:
        said = Finding(code="head-equals-embedding", level="note", tensor=name, message="the head is stored on its own "
                       "and is the token embedding, value for value: the model may be a tied one")
        return "untied", [said] if same else []
    if same:
        return "tied and stored, equal", []
    return "tied and stored, different", [Finding(
        code="weights-head-differs", level="warning", tensor=name, message=f"{model.tied_why}, but the head is stored "
        "too and is not the token embedding: the embedding is used, as the config says")]


def _same(files: Files, head: str, table: str, looks: Iterable[Look]) -> bool:
    """Whether a stored head is the embedding, if need be in the other's type."""
    one, other = files.tensors[head], files.tensors[table]
    codes = {u.held.name: f.digest for u, f in looks if u.held.name in (head, table)}
    if one.shape != other.shape or not codes:
        return False
    if codes[head] == codes[table] and one.dtype == other.dtype:
        return True
    if one.dtype == other.dtype or not {one.dtype, other.dtype} <= FLOATS.keys() or files.parts(head):
        return False
    with files.view(head) as x, files.view(table) as y:
        return Difference(iter([x]), iter([y]), (one.dtype, other.dtype)).cast


def _shown(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Errors first; of each code the first SHOWN, and how many more."""
    by: dict[tuple[str, str], list[Finding]] = {}
    for f in findings:
        by.setdefault((f.level, f.code), []).append(f)
    for (level, code), some in sorted(by.items(), key=lambda item: LEVELS.index(item[0][0])):
        yield from islice(some, SHOWN)
        if len(some) > SHOWN:
            yield Finding(code=code, level=level, message=f"and {len(some) - SHOWN:,} more of this kind")
