"""`diff`: two checkpoints compared tensor by tensor; bytes first, values where bytes differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from llamactl.analysis.diff import DiffReport, Numbers, TensorDiff, described, report
from llamactl.analysis.diff import Side as Told
from llamactl.checkpoint.held import FLOATS
from llamactl.checkpoint.identical import same_bytes, same_stored, stored_form, stored_forms
from llamactl.cli.located import locate, need_torch
from llamactl.cli.options import Access, Output
from llamactl.cli.progress import Progress
from llamactl.cli.sides import Half, Notes, Pair, Side, open_side, paired
from llamactl.errors import InputRefused
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.checkpoint.emit import Block
    from llamactl.checkpoint.files import Files
    from llamactl.checkpoint.plan import Output as Tensor

_SCALES = (".scale", ".input_scale")
_ZEROS = "zeros, and the other model has no bias here"
_SIGNS = "the values are equal: signs of zeros or kinds of NaN are not"


class _Loaded(NamedTuple):
    """What `show` reads of a model."""

    source: Any
    model: Model
    warnings: Notes
    edits: tuple[str, ...] = ()


def diff(first: str, second: str, out: Output, reach: Access, *, strict: bool, every: bool) -> DiffReport:
    """The command: open both, compare, tell. Raises LlamactlError; differences are no failure here."""
    from llamactl.cli.show import show

    located = [locate(ref, reach) for ref in (first, second)]
    a, b = (open_side(label, at) for label, at in zip("AB", located, strict=True))
    pairs, notes = paired(a, b)
    work = _Work(a, b)
    work.check(pairs)
    with Progress(out, "comparing", sum(h.output.nbytes for p in pairs for h in (p.a, p.b) if h and h.output)) as seen:
        rows = [work.compare(p, seen) for p in pairs]
    found = report((_told(a), _told(b)), described(a.at.model, b.at.model), rows, strict=strict)
    loaded: list[Any] = [_Loaded(s.at.source, s.at.model, (*s.at.notes, *s.files.warnings)) for s in (a, b)]
    body = found.to_dict()
    body["models"] = [{**m, "source": s.at.source.to_dict()} for m, s in zip(body["models"], (a, b), strict=True)]
    show("diff", loaded, [found], {"strict": strict, "all": every}, out, warnings=(*notes, *work.notes), result=body,
         every=every)
    return found


def _told(s: Side) -> Told:
    m = s.at.model
    return Told(id=s.at.source.id, family=m.family, model_type=m.model_type, layout=s.at.layout, path=s.at.path,
                parameters=m.total(), tensors=len(s.files.tensors), tied=m.tied)


class _Work:
    """Compares pair by pair. notes: what could not be computed."""

    def __init__(self, a: Side, b: Side) -> None:
        self.a, self.b = a, b
        self.torch = find_spec("torch") is not None
        self.notes: Notes = ()

    def check(self, pairs: Iterable[Pair]) -> None:
        """Refuse what cannot be judged here, before anything is read. Raises NotAvailable extra-missing."""
        both = ((p.a.output, p.b.output) for p in pairs if p.a and p.b and p.a.shape == p.b.shape)
        if not self.torch and any(a and b and stored_forms(a, b) is None for a, b in both):
            need_torch("comparing tensors of different types, or turned against each other,")

    def compare(self, p: Pair, seen: Callable[[int], None]) -> TensorDiff:
        """One row of the report."""
        a, b = p.a, p.b
        left = sum(h.output.nbytes for h in (a, b) if h and h.output)

        def tick(nbytes: int) -> None:
            nonlocal left
            seen(min(nbytes, left))
            left -= min(nbytes, left)

        status, numbers, note = self._judge(p, tick)
        tick(left)
        return TensorDiff(name=p.name, status=status, stored=(a.stored if a else (), b.stored if b else ()),
                          dtypes=(a and a.dtype, b and b.dtype), shapes=(a and a.shape, b and b.shape),
                          numbers=numbers, note="; ".join(x for x in (note, p.note) if x) or None)

    def _judge(self, p: Pair, tick: Callable[[int], None]) -> tuple[str, Numbers | None, str | None]:
        a, b = p.a, p.b
        if a is None or b is None:
            half, here, there = (a, self.a, self.b) if b is None else (b, self.b, self.a)
            assert half is not None
            if p.name.endswith(".bias") and p.name not in there.lacks and _zeros(here.files, half.output, tick):
                return "equal", None, _ZEROS
            return "missing", None, f"in {here.label} alone"
        if a.odd or b.odd or a.shape != b.shape:
            return "shape", None, None
        if a.output is None or b.output is None:
            same = a.dtype == b.dtype and same_stored(self.a.files, self.b.files, p.name)
            return "equal" if same else "different", None, None
        raw = stored_forms(a.output, b.output)
        if raw is not None and same_bytes(_blocks(self.a.files, raw[0], tick), _blocks(self.b.files, raw[1], tick)):
            return "equal", None, None
        if raw is not None and not self.torch:
            self.notes = (("diff-numbers", "torch is not installed: how far tensors are apart was not computed"),)
            return "different", None, None
        for side, half in ((self.a, a), (self.b, b)):
            why = _unread(side, half)
            if why and raw is None:
                raise InputRefused("weights-quantized", f"{p.name}: {why}", path=side.at.path,
                                   help="take another quantisation of the model, e.g. Q8_0")
            if why:
                return "different", None, f"{side.label}: {why}"
        return self._measured(a, b, tick)

    def _measured(self, a: Half, b: Half, tick: Callable[[int], None]) -> tuple[str, Numbers | None, str | None]:
        from llamactl.net.differing import Difference

        assert a.output is not None
        assert b.output is not None
        one, other = _precise(a.output), _precise(b.output)
        d = Difference(_blocks(self.a.files, one, tick), _blocks(self.b.files, other, tick), (one.dtype, other.dtype),
                       shifted=any(r.add for r in (*one.rects, *other.rects)))
        if d.bits and a.dtype == b.dtype:
            return "equal", None, None
        status = "different"
        if a.dtype != b.dtype and d.cast:
            status = "dtype"
        elif d.near:
            status = "rounding"
        numbers = Numbers(elements=d.elements, differing=d.differing, max_abs=_finite(d.max_abs), nans=d.nans,
                          relative=_finite(d.max_abs / d.largest) if d.largest and d.max_abs is not None else None,
                          not_finite=d.not_finite)
        return status, numbers, None if d.differing or status != "different" else _SIGNS


def _unread(side: Side, half: Half) -> str | None:
    """Why the values of a tensor cannot be had."""
    from llamactl.net.weights_gguf import QUANTISED

    kinds = {x for x in half.dtype.split("+") if x not in FLOATS}
    if kinds and any(n.endswith(_SCALES) for n in side.files.tensors):
        return "quantised weights with scales beside them are not unpacked here"
    odd = sorted(kinds - set(QUANTISED))
    return f"{', '.join(odd)} is not unpacked here" if odd else None


def _finite(x: float | None) -> float | None:
    return x if x is not None and abs(x) != float("inf") else None


def _precise(o: Tensor) -> Tensor:
    """In a type that takes a number away without a loss of its own."""
    from llamactl.checkpoint.plan import retyped

    return retyped(o, "F32") if o.dtype in ("F16", "BF16") and any(r.add for r in o.rects) else o


def _zeros(files: Files, o: Tensor | None, tick: Callable[[int], None]) -> bool:
    """Whether all bytes of a stored tensor are 0."""
    form = stored_form(o) if o else None
    return form is not None and not form.add and not any(bytes(block).strip(b"\0") for block in
                                                         _blocks(files, form.output, tick))


def _blocks(files: Files, o: Tensor, tick: Callable[[int], None]) -> Iterator[Block]:
    """The bytes of an output; torch comes with the first that is computed."""
    from llamactl.checkpoint.emit import Emitter

    values = None
    if o.how == "values":
        from llamactl.net.values import Values

        values = Values(files)
    return Emitter(files, values, digest=False, seen=tick).blocks(o)
