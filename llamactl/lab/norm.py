"""What does RMSNorm leave out of LayerNorm, and what does that cost and save?

Source: RMSNorm, arXiv:1910.07467; LayerNorm, arXiv:1607.06450.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from statistics import median, quantiles

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from llamactl.analysis.ablation import NormInputs
from llamactl.analysis.experiment import Claim, Finding, Outcome, found, skipped
from llamactl.lab._setting import NO_CHECKPOINT, Checkpoint, Setting
from llamactl.net.blocks import RowNorm
from llamactl.net.device import name_of
from llamactl.spec.parts import Norm
from llamactl.verify.ablations import chosen

WIDTHS = (64, 512, 4_096)
NUMBERS, SAMPLES = 1 << 20, 8  # in one sample's rows
OFFSETS_LIMIT = 0.9  # much lower than 1 - 1/(2d)
RANDOM = 0.6745  # the median of |N(0, 1)|: of a random row of width d, |mean| / RMS is about RANDOM / sqrt(d)
STEPPED = "RMSNorm takes longer here: on a CPU torch computes rms_norm in steps and layer_norm in one kernel"
ROWS, TIMED = 512, (576, 4_096)
EPS, SMALL = 1e-6, 1e-3  # rows of RMS SMALL have a mean(x^2) of EPS
ALIKE = 1e-5
CENTRED, CENTRED_WHAT = "norm_kind=layer", "LayerNorm without a bias for RMSNorm: the loss rises by"
SECONDS, LEAST = 0.1, 5  # of timing one form, and samples of it


def run(given: Setting) -> Outcome:
    """Parameters, correlation, real inputs, and times."""
    return Outcome(claims=(
        Claim(claim="RMSNorm has d parameters, LayerNorm 2d", formula="g, against g and b",
              findings=tuple(_parameters(given))),
        Claim(claim="on rows without a mean of their own both give nearly the same; on rows with one they do not",
              formula="correlation 1 - 1/(2d) for rows of independent N(0, 1), with g = 1 and b = 0",
              findings=tuple(_correlations(given))),
        Claim(claim="rows inside trained networks have little mean, so that dropping it is cheap",
              formula="|mean| / RMS of a row that a norm reads; loss(the mean taken off) - loss",
              findings=tuple(_inputs(given))),
        Claim(claim="what the kernels take here: RMSNorm beside LayerNorm, and each beside its formula step by step, "
                    "which gives the same",
              formula="x / sqrt(mean(x^2) + eps) g; (x - mean(x)) / sqrt(var(x) + eps) g + b",
              findings=(*_times(given), *_alike(given)))))


def _parameters(given: Setting) -> Iterator[Finding]:
    for name, edits in (("llama-3-8b", ()), ("llama-3-8b", ("norm=layer",)), ("gpt2", ())):
        norm = given.small(name, *edits).norm
        assert norm is not None
        of = f"{name}{''.join(f', {e}' for e in edits)}: d {norm.dim:,}"
        yield found("RMSNorm" if norm.kind == "rms" else "LayerNorm", sum(x.elements for x in norm.leaves("norm")),
                    of=of, unit="parameters", expected=norm.dim * (1 if norm.kind == "rms" else 2))


def _norms(dim: int, device: torch.device, draws: torch.Generator | None = None) -> tuple[RowNorm, RowNorm]:
    """RMSNorm and LayerNorm with g = 1 and b = 0; with draws, g = 1 + 0.3 N(0, 1) and b = 0.3 N(0, 1)."""
    rms = Norm(dim=dim, eps=EPS)
    out = [RowNorm(x, dtype=torch.float32, device=device) for x in (rms, replace(rms, kind="layer", bias=True))]
    for norm in out:
        for name, value in norm.named_parameters():
            value.fill_(float(name == "weight"))
            if draws is not None:
                value.add_(torch.randn(dim, generator=draws).to(device), alpha=0.3)
    return out[0], out[1]


def _correlations(given: Setting) -> Iterator[Finding]:
    draws = given.draws()
    for dim in WIDTHS:
        pair, of = _norms(dim, given.device), f"{SAMPLES} x {NUMBERS // dim:,} drawn rows"
        rows = [torch.randn(NUMBERS // dim, dim, generator=draws) for _ in range(SAMPLES)]
        values = [_correlation(pair, x.to(given.device)) for x in rows]
        # The next term of the series, and four standard errors of so many rows.
        tolerance = 0.5 / dim**2 + 4 * 0.5**0.5 / dim / (SAMPLES * len(rows[0])) ** 0.5
        yield found(f"centred rows, d {dim:,}", sum(values) / SAMPLES, of=of,
                    spread=values, expected=1 - 1 / (2 * dim), tolerance=tolerance)
        if dim == 512:
            moved = [_correlation(pair, (x + torch.randn(len(x), 1, generator=draws)).to(given.device)) for x in rows]
            yield found(f"each row moved by its own N(0, 1), d {dim:,}", sum(moved) / SAMPLES,
                        of=of, spread=moved, expected=OFFSETS_LIMIT, relation="<=", ours=True)


def _correlation(pair: tuple[RowNorm, RowNorm], x: Tensor) -> float:
    a, b = (norm(x).double().cpu().flatten() for norm in pair) if x.device.type != "mps" else (
        norm(x).cpu().double().flatten() for norm in pair)
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def _inputs(given: Setting) -> Iterator[Finding]:
    if not given.checkpoints:
        yield skipped("|mean| / RMS at the norms", NO_CHECKPOINT)
    for c in given.checkpoints:
        given.tell(f"norm: what the norms of {c.id} read")
        yield from _read(c)


def _read(c: Checkpoint) -> Iterator[Finding]:
    done = c.ablated((CENTRED,) if CENTRED in chosen(c.model) else ())
    yield from _rows(c, done.norms)
    if not done.rows:
        yield skipped(CENTRED_WHAT, "it has no RMSNorm", of=c.id, unit="nats per token")
        return
    (row,) = done.rows
    why = c.unread(done.base_loss)
    if why or row.change is None:
        yield skipped(CENTRED_WHAT, why or row.note or row.status, of=c.id, unit="nats per token")
        return
    yield found("loss", done.base_loss, of=c.id, unit="nats per token")
    yield found(CENTRED_WHAT, row.change, of=c.id, unit="nats per token",
                note=None if row.standard_error is None else f"standard error {row.standard_error:.2g}")


def _rows(c: Checkpoint, norms: NormInputs | None) -> Iterator[Finding]:
    """Nothing is claimed of these: how small is small depends on the text, so a random row stands beside."""
    if norms is None:
        yield skipped("|mean| / RMS at the norms", "it has none", of=c.id)
        return
    medians = [x.median for x in norms.norms if x.median is not None]
    said = [] if c.read else ["on made-up tokens"]
    chance, of = f"a random row of that width: {RANDOM / c.model.hidden**0.5:.2g}", f"{c.id}, d {c.model.hidden:,}"
    yield found("|mean| / RMS: the median norm", norms.median, of=of, spread=medians, note="; ".join([chance, *said]))
    yield found("|mean| / RMS: the norm with the largest median", norms.worst, of=of,
                note="; ".join([norms.worst_at, chance, *said]))
    row, at = max((x.worst, x.at) for x in norms.norms if x.worst is not None)
    yield found("|mean| / RMS: the largest single row", row, of=of, note="; ".join([f"read by {at}", *said]))


def _times(given: Setting) -> Iterator[Finding]:
    threads = sorted({1, torch.get_num_threads()}) if given.device.type == "cpu" else [torch.get_num_threads()]
    for dim in TIMED:
        rms, layer = _norms(dim, given.device)
        x = torch.randn(ROWS, dim, generator=given.draws()).to(given.device)
        forms: dict[str, Callable[[Tensor], Tensor]] = {
            "RMSNorm, fused": rms, "RMSNorm, written out": partial(_rms, norm=rms),
            "LayerNorm, fused": layer, "LayerNorm, written out": partial(_layer, norm=layer)}
        for n in threads:
            of = f"{ROWS} x {dim:,}, " + (f"cpu, {n} thread{'' if n == 1 else 's'}" if given.device.type == "cpu" else
                                          name_of(given.device))
            took = {}
            for name, call in forms.items():
                given.tell(f"norm: timing {name}, {of}")
                took[name] = _timed(call, x, n)
                yield found(f"{name}: median", median(took[name]), of=of, unit="us", spread=took[name])
            yield from _ratios(took, of, given.device.type)


def _alike(given: Setting) -> Iterator[Finding]:
    """The network's norm less its formula. Gains and biases are drawn and half of the rows are small, for what ignores
    g, b or eps is right wherever they do nothing.
    """
    for dim in TIMED:
        draws = given.draws()
        rms, layer = _norms(dim, given.device, draws)
        x = torch.randn(ROWS, dim, generator=draws)
        x[::2] *= SMALL
        x = x.to(given.device)
        for name, a, b in (("RMSNorm", rms(x), _rms(x, rms)), ("LayerNorm", layer(x), _layer(x, layer))):
            yield found(f"{name}: fused less written out, largest", float((a - b).abs().max()), expected=ALIKE,
                        of=f"{ROWS} x {dim:,}, drawn g and b, half of the rows x {SMALL:g}", relation="<=", ours=True)


def _ratios(took: dict[str, list[float]], of: str, device: str) -> Iterator[Finding]:
    """RMSNorm's time over LayerNorm's, and a kernel's over its formula's; nothing is claimed of what depends on the
    machine, and nothing is said where other work on it may have made the difference.
    """
    for form in ("fused", "written out"):
        note = STEPPED if form == "fused" and device == "cpu" else "RMSNorm takes longer here"
        yield _ratio(f"RMSNorm / LayerNorm, {form}", took[f"RMSNorm, {form}"], took[f"LayerNorm, {form}"], of, note)
    for name in ("RMSNorm", "LayerNorm"):
        yield _ratio(f"{name}: fused / written out", took[f"{name}, fused"], took[f"{name}, written out"], of,
                     "the fused one takes longer here")


def _ratio(what: str, a: list[float], b: list[float], of: str, slower: str) -> Finding:
    """slower: said where the middle half of `a` lies above that of `b`."""
    clear = quantiles(a, method="inclusive")[0] > quantiles(b, method="inclusive")[2]
    return found(what, median(a) / median(b), of=of, unit="times", note=slower if clear else None)


def _timed(call: Callable[[Tensor], Tensor], x: Tensor, threads: int) -> list[float]:
    """Microseconds of one call, LEAST times or more."""
    timer = Timer("call(x)", globals={"call": call, "x": x}, num_threads=threads)
    with torch.inference_mode():
        took = timer.blocked_autorange(min_run_time=SECONDS)
        times = [*took.times, *(timer.timeit(took.number_per_run).times[0] for _ in range(LEAST - len(took.times)))]
    return [1e6 * t for t in times]


def _rms(x: Tensor, norm: RowNorm) -> Tensor:
    assert norm.weight is not None
    return x / (x.square().mean(-1, keepdim=True) + norm.part.eps).sqrt() * norm.weight


def _layer(x: Tensor, norm: RowNorm) -> Tensor:
    assert norm.weight is not None
    assert norm.bias is not None
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + norm.part.eps).sqrt() * norm.weight + norm.bias
