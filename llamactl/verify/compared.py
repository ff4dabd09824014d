"""Two sides on the same tokens: measures, verdict, and where they differ the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llamactl.analysis.verification import Inventory, Measures, Place, Probe, Side, VerifyReport
from llamactl.errors import InputRefused
from llamactl.net.decoder import Source
from llamactl.net.streamed import logits
from llamactl.net.taken import Taking
from llamactl.spec.model import Model
from llamactl.spec.taken import Taken, take
from llamactl.verify.ablate import moved
from llamactl.verify.blockwise import Flow
from llamactl.verify.diagnose import Diagnosis, blocks_alone, diagnose
from llamactl.verify.floor import bf16_floor, floor
from llamactl.verify.matching import Target
from llamactl.verify.measure import common, measure, measure_top
from llamactl.verify.network import Network
from llamactl.verify.other import Other, log_softmax
from llamactl.verify.probe import short

HALVES = ("bf16", "fp16")
MOVED = 5000  # positions: of no effect on RoPE but the rounding of its angles
MOVED_TIMES = 8.0  # of the limit: further off than that it is not looked at
BF16_TIMES = 4.0  # of what bf16 does to this model here, the most that another bf16 path may do


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """subject: the one that is judged ("the candidate"), by what ("the checkpoint"). reverse: the network that is
    edited is the judged one, and its edits lead back to what is right. seconds, sweep: as in diagnose. explain: whether
    to look for the cause at all. rounded: the 16-bit type of the judged weights, where the reference was recorded from
    others, which may have been wider.
    """

    subject: str
    by: str
    reverse: bool = False
    seconds: float = 540.0
    sweep: bool = True
    explain: bool = True
    windows: bool = True
    rounded: str | None = None


def run_here(model: Model, source: Source, ids: Sequence[int], progress: Callable[[int, int], None] | None = None
             ) -> tuple[Tensor, Tensor]:
    """(ids (1, T), logits (T, V)) of a checkpoint in fp32. Errors: those of net.streamed.logits."""
    at = torch.tensor([list(ids)])
    return at, logits(model, source, at, progress=progress)[0]


@torch.no_grad()
def compared(model: Model, source: Source, ids: Tensor, ours: Tensor, other: Other, sides: tuple[Side, Side],
             probe: Probe, setting: Setting, inventory: Sequence[Inventory] = (),
             say: Callable[[str], None] = lambda text: None) -> VerifyReport:
    """Hold `other` against `ours`, the (T, V) logits of `model` on `ids` (1, T); which is right is the setting's word.
    """
    n = ids.shape[1]
    limits = list(short(model, n))
    say("measuring the floor of arithmetic")
    base, _ = floor(model, source, ids, ours)
    theirs, limit, ours, note = _comparable(ours, other, base.limit)
    limits += [note] if note else []
    limits += [f"{code}: {text}" if code == "log-probs" else text for code, text in other.notes]
    m = _measures(ours, theirs, other, ids[0], limit, setting.reverse)
    state = {"sides": sides, "probe": probe, "measures": m, "floor": base, "inventory": tuple(inventory)}

    def report(verdict: str, why: str, d: Diagnosis | None = None, extra: Sequence[str] = ()) -> VerifyReport:
        d = d or Diagnosis()
        return VerifyReport(verdict=verdict, why=why, explanations=d.explanations, first_difference=d.place,
                            layers=d.layers, tried=d.tried, limits=(*limits, *d.limits, *extra), **state)  # type: ignore[arg-type]

    if any(m.non_finite):
        return report("different", _not_finite(m), _odd(other, model, source, ids, limit, setting))
    assert m.max_abs_dlogit is not None
    if m.max_abs_dlogit <= limit:
        blind = _blind(model, n, setting)
        if blind:
            return report("cannot-judge", f"the logits agree, but {blind}")
        if note is None and theirs is not None and torch.equal(ours, theirs.to(ours.dtype)):
            return report("equal", "the logits are equal bit for bit")
        return report("same", f"the logits are at most {m.max_abs_dlogit:.2g} apart; arithmetic alone explains up to "
                      f"{limit:.2g}")
    if theirs is not None and m.max_abs_dlogit <= MOVED_TIMES * limit:
        far = _moved(model, source, ids, ours)
        if m.max_abs_dlogit <= 2 * far and not _blind(model, n, setting):
            return report("same", f"the logits are at most {m.max_abs_dlogit:.2g} apart, as far as positions moved by "
                          f"{MOVED:,} take them ({far:.2g}): rotations of large angles, and no mistake")
    if other.computed_in in HALVES:
        return _half(model, source, ids, ours, other, m, report, setting)
    if setting.rounded and (near := _rounded(model, source, ids, ours, m, setting)):
        hint = "weights of 16 bits hide small mistakes: record the reference of the rounded checkpoint"
        return report("cannot-judge", near, None, (hint,))
    if theirs is None or not setting.explain:
        return report("different", _apart(m, limit, setting))
    net = Network(model, source, ids, other.tensors)
    target = Target(theirs, limit, other.log_probs, m.max_abs_dlogit)
    flow = other.flow() if theirs.shape[1] == model.head.vocab and not other.log_probs else None
    found = diagnose(net, target, flow, seconds=setting.seconds, sweep=setting.sweep, say=say, parts=other.parts)
    if found.explanations and not found.partial:
        return report("explained", _explained(found, setting), found)
    return report("different", _apart(m, limit, setting), found)


def _comparable(ours: Tensor, other: Other, limit: float) -> tuple[Tensor | None, float, Tensor, str | None]:
    """(theirs, limit, ours, note) with one vocabulary, and both as log-probabilities where one is."""
    if other.logits is None:
        return None, limit, ours, None
    if len(other.logits) != len(ours):
        raise InputRefused("tokens-differ", f"{len(other.logits):,} rows of logits for {len(ours):,} tokens",
                           path=other.ref, help="give the tokens they were computed on with --tokens")
    first, second, note = common(ours, other.logits)
    if other.log_probs:
        first = log_softmax(first)
    return second, limit, first, note


def _measures(ours: Tensor, theirs: Tensor | None, other: Other, ids: Tensor, limit: float, reverse: bool) -> Measures:
    if theirs is None:
        assert other.top is not None
        return measure_top(*other.top, ours, ids, limit)
    return measure(theirs, ours, ids, limit) if reverse else measure(ours, theirs, ids, limit)


def _blind(model: Model, n: int, setting: Setting) -> str | None:
    """Why agreement on so few tokens proves nothing."""
    if n == 1:
        return short(model, 1)[0]
    windows = sorted({w for x in model.layers if (w := getattr(x.attn, "window", None)) is not None})
    room = model.context.usable
    over = [w for w in windows if n <= w and (room is None or room > w)]
    if over and setting.windows:
        return f"no token is past the window of {over[0]:,}: whether it is kept does not show in {n:,} tokens"
    return None


def _moved(model: Model, source: Source, ids: Tensor, ours: Tensor) -> float:
    """How far the logits go when every position is moved, which changes nothing but the size of RoPE's angles."""
    if model.positions is not None or not any(x.attn is not None and x.attn.rope is not None for x in model.layers):
        return 0.0
    far = (logits(moved(model, MOVED), source, ids)[0] - ours).abs().max()
    return float(far) if bool(torch.isfinite(far)) else 0.0


def _not_finite(m: Measures) -> str:
    words = [f"{n:,} of {whose}" for n, whose in zip(m.non_finite, ("the first", "the second"), strict=True) if n]
    return f"logits that are nan or infinite: {' and '.join(words)}; nothing can be said to be the same"


def _odd(other: Other, model: Model, source: Source, ids: Tensor, limit: float, setting: Setting) -> Diagnosis:
    """The blocks whose output is not finite: of a module each by itself, fed with the right input."""
    net, flow = Network(model, source, ids, other.tensors), other.flow()
    right = net.streams(net.tokens)
    if setting.explain and other.refed is not None and flow is not None and len(flow.inputs) == model.n_layers and all(
            bool(torch.isfinite(x).all()) for x in right):
        inputs = [x[0] for x in right[:-1]]
        fed = Flow(embedded=flow.embedded, inputs=inputs, outputs=other.refed(inputs), logits=flow.logits)
        return blocks_alone(net, fed, limit, seconds=setting.seconds)
    for i, y in enumerate(other.outputs):
        if y is not None and not bool(torch.isfinite(y).all()):
            return Diagnosis(Place(where=f"layer {i}", relative=1e30, floor=0.0))
    return Diagnosis()


def _half(model: Model, source: Source, ids: Tensor, ours: Tensor, other: Other, m: Measures,
          report: Callable[..., VerifyReport], setting: Setting) -> VerifyReport:
    """One side is in 16 bits: whether the distance is what 16 bits do."""
    low = bf16_floor(model, source, ids, ours)
    near = (m.max_kl is not None and low.max_kl is not None and low.mean_kl is not None and m.mean_kl is not None
            and m.max_kl <= BF16_TIMES * low.max_kl and m.mean_kl <= BF16_TIMES * low.mean_kl)
    kind = other.computed_in
    if near:
        return report("cannot-judge", f"{setting.subject} is in {kind}: KL up to {m.max_kl:.2g}, and bf16 arithmetic "
                      f"alone makes {low.max_kl:.2g} here; a small mistake would not show", None,
                      (f"{kind} hides small mistakes: give logits computed in fp32",))
    return report("different", f"{setting.subject} is in {kind}, and further off than that explains: KL up to "
                  f"{m.max_kl if m.max_kl is not None else float('nan'):.2g}, bf16 arithmetic alone makes "
                  f"{low.max_kl or 0:.2g}", None,
                  (f"computed in {kind}: mistakes are named from fp32 logits or a module alone",))


def _rounded(model: Model, source: Source, ids: Tensor, ours: Tensor, m: Measures, setting: Setting) -> str | None:
    """Why a distance may be that of weights rounded to 16 bits, None where it is too far for that."""
    other = take(model, Taken("*", "round", "jitter"))
    low = measure(ours, logits(other, Taking(source, other), ids)[0], None, 0.0)
    if None in (m.max_kl, m.mean_kl, low.max_kl, low.mean_kl):
        return None
    if m.max_kl > BF16_TIMES * low.max_kl or m.mean_kl > BF16_TIMES * low.mean_kl:  # type: ignore[operator]
        return None
    return (f"{setting.subject} is in {setting.rounded}: KL up to {m.max_kl:.2g}, and rounding weights to 16 bits "
            f"makes {low.max_kl:.2g} here; a small mistake would not show")


def _apart(m: Measures, limit: float, setting: Setting) -> str:
    kl = "" if m.max_kl is None else f", KL up to {m.max_kl:.2g} nats"
    return (f"{setting.subject} is not {setting.by}: logits up to {m.max_abs_dlogit:.3g} apart{kl}; arithmetic "
            f"explains {limit:.2g}")


def _explained(found: Diagnosis, setting: Setting) -> str:
    names = " and ".join(f"{e.words} ({e.scope})" for e in found.explanations)
    if setting.reverse:
        return f"{setting.by} is {setting.subject} with this change: {names}"
    return f"{setting.subject} is {setting.by} with this mistake: {names}"

