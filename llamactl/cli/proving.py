"""The proof of a conversion: the written files are read back, tensor by tensor and as a network."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from llamactl import arch
from llamactl.analysis.conversion import LogitsProof, Proof
from llamactl.cli.located import Located, locate, open_files
from llamactl.cli.options import Access
from llamactl.errors import CheckFailed, InputRefused, LlamactlError

if TYPE_CHECKING:
    from llamactl.checkpoint.files import Files
    from llamactl.checkpoint.plan import Output, Planner
    from llamactl.cli.planning import Conversion

NO_TORCH = "torch is not installed"
_EXACT_IN = {"F16": ("F32", "F64"), "BF16": ("F32", "F64"), "F32": ("F64",)}
_ROUNDING = 2.0**-22  # of 1 + w in float32, twice
TOKENS = 64  # fewer are blind to the order of RoPE's pairs


def prove(made: Conversion, folder: str, seen: Callable[[int], None], *, text: list[int] | None = None) -> Proof:
    """Compare what lies in `folder` with the source. Raises CheckFailed proof-failed: then nothing is published.

    text: token ids whose loss is measured on both sides.
    """
    if not made.readable:
        return Proof(exact=0, cast=0, rounded=0, changed=0, logits=None, logits_not_run=NO_TORCH)
    at = locate(os.path.abspath(folder), Access(offline=True, hub=False))
    wrong = different(made.target.model, at.model)
    if wrong:
        raise _failed(f"the config as written describes another model: {wrong}")
    files = open_files(at)
    counts = _tensors(made, at, files, seen)
    logits, why = _logits(made, at, text)
    return Proof(**counts, logits=logits, logits_not_run=why)


def different(want: Any, got: Any) -> str | None:
    """What is not the same in two descriptions, None if nothing is that bears on a result."""
    from llamactl.arch._out import difference

    for part in ("layers", "embed", "positions", "embed_norm", "norm", "head"):
        found = difference(getattr(want, part), getattr(got, part), part)
        if found:
            return found
    return None


def _tensors(made: Conversion, at: Located, files: Files, seen: Callable[[int], None]) -> dict[str, int]:
    """How many canonical tensors of the output are the source's, in which sense (analysis.conversion.Proof)."""
    from llamactl.checkpoint.emit import Emitter
    from llamactl.checkpoint.held import FLOATS
    from llamactl.checkpoint.plan import retyped

    values = _Late(made.files, clamp=made.values is not None and made.values.clamp)
    ours, theirs = Emitter(made.files, values, seen=seen), Emitter(files, _Late(files), seen=seen)
    counts = {"exact": 0, "cast": 0, "rounded": 0, "changed": 0}
    for a, b in pairs(made, at, files):
        if any(p.dtype not in FLOATS for p in b.sources):
            counts["changed"] += 1
            continue
        kind = comparable(a.dtype, b.dtype)
        cast = kind != a.dtype
        if not cast and not any(r.add for r in (*a.rects, *b.rects)):
            kind = b.dtype  # the wider: to widen bf16 needs no torch, and takes nothing away
        a, b = retyped(a, kind), retyped(b, kind)
        one, other = _digest(ours, a), _digest(theirs, b)
        if one == other:
            counts["changed" if len(a.terms) > 1 else "cast" if cast else "exact"] += 1
        elif any(r.add for r in (*a.rects, *b.rects)) and _near(made.files, files, a, b):
            counts["rounded"] += 1
        else:
            raise _failed(f"{a.name}, read back, is not the source's")
    return counts


def pairs(made: Conversion, at: Located, files: Files) -> Iterator[tuple[Output, Output]]:
    """Each canonical tensor as the source gives it and as the output does."""
    from llamactl.checkpoint.account import account
    from llamactl.checkpoint.plan import Planner, Side, canonical
    from llamactl.spec.naming import stored_tensors

    found = account(at.path, files.tensors, at.model, arch.names(at.model, at.layout), layout=at.layout,
                    ignored=arch.ignored(at.model, at.layout), packed=at.layout != "gguf", whole=True)
    rules = canonical(made.target.model)
    plain = Side(made.target.model, "canonical", rules)
    ours = Planner(made.files, made.source, plain, natural)
    theirs: Planner = Planner(files, Side(at.model, at.layout, (), found.at), Side(at.model, "canonical", rules),
                              natural)
    for s in stored_tensors(made.target.model, rules):
        yield ours.output(s), theirs.output(s)


def natural(stored: Any, kinds: Any) -> str:
    """The type that holds what is stored."""
    from llamactl.cli.planning import widest

    return widest(kinds) if kinds else "F32"


def comparable(a: str, b: str) -> str:
    """The type in which a value that went from `a` to `b` is still itself."""
    return a if a == b or b in _EXACT_IN.get(a, ()) else b


def _digest(emitter: Any, o: Output) -> str:
    for _ in emitter.blocks(o):
        pass
    return str(emitter.digests.pop(o.name))


class _Late:
    """net.values.Values, imported with the first output that needs it."""

    def __init__(self, files: Files, *, clamp: bool = False) -> None:
        self.files, self.clamp = files, clamp
        self.values: Any = None

    def blocks(self, o: Output) -> Any:
        if self.values is None:
            from llamactl.cli.located import need_torch

            need_torch("changing values on the way")
            from llamactl.net.values import Values

            self.values = Values(self.files, clamp=self.clamp)
        if self.clamp:
            self.values.check(o)  # which values are too large is known by the output's own name
        return self.values.blocks(o)


def _near(files: Files, others: Files, a: Output, b: Output) -> bool:
    """Whether two tensors differ by no more than the rounding of the 1 that was added to one and taken away again."""
    from llamactl.net.values import Values

    one, other = Values(files).tensor(a), Values(others).tensor(b)
    return bool(((one - other).abs() <= _ROUNDING * (1 + one.abs())).all())


def _logits(made: Conversion, at: Located, text: list[int] | None) -> tuple[LogitsProof | None, str | None]:
    """The networks of both sides on the same tokens; or why they were not run."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return None, NO_TORCH
    from llamactl.cli.runnable import opened
    from llamactl.net.proof import compare

    try:
        found = compare((made.at.model, opened(made.at).weights), (at.model, opened(at).weights), TOKENS, text)
    except InputRefused as e:
        if e.code == "not-finite":
            raise _failed(e.message) from None
        return None, e.message
    except LlamactlError as e:
        return None, e.message
    d = found.divergence
    if _same_weights(made) and d.max_abs_dlogit > 1e-3 * max(1.0, found.largest):
        raise _failed(f"the logits of the output are up to {d.max_abs_dlogit:.3g} off")
    before, after = found.losses or (None, None)
    return LogitsProof(tokens=d.tokens, max_abs_dlogit=d.max_abs_dlogit, max_kl=d.max_kl,
                       top1_agreement=d.top1_agreement, loss_source=before, loss_output=after), None


def _same_weights(made: Conversion) -> bool:
    """Whether the output is meant to be the same network, to the bit or nearly."""
    return not any(len(o.terms) > 1 or any(comparable(p.dtype, o.dtype) != p.dtype for p in o.sources)
                   for o in made.outputs)


def _failed(what: str) -> CheckFailed:
    return CheckFailed("proof-failed", f"{what}; nothing was published",
                       help="please report this; --no-proof writes without the check")
