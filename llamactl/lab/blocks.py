"""What did seven years change in a block? The one of 2017 and the one of 2024, trained alike at equal parameters.

Source: Attention Is All You Need, arXiv:1706.03762; Llama 3, arXiv:2407.21783; pre-norm, arXiv:2002.04745.

Both are the bundled descriptions (transformer-base, llama-3-8b) made small by edits, with one vocabulary of bytes and
a tied head; the width of the second's feed-forward is what brings it nearest to the first's parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from llamactl.analysis.experiment import Cell, Chart, Claim, Finding, Grid, Line, Outcome, Passage, found
from llamactl.errors import printable
from llamactl.lab._drawn import network
from llamactl.lab._setting import Setting, on_threads
from llamactl.lab._tracing import Stage, side_by_side, trace
from llamactl.lab._training import BYTES, Learned, Recipe, Windows, learn, windows
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder
from llamactl.net.generate import generate
from llamactl.net.sample import Sampling
from llamactl.spec.edits import apply
from llamactl.spec.features import features, shown
from llamactl.spec.model import Model

OLD, NEW = "2017", "2024"
SIZES = ("n_layers=4", f"vocab={BYTES}")
OLDER = ("head_dim=32", "n_heads=4", "hidden=128", "ffn=512")
NEWER = ("n_kv_heads=2", "n_heads=4", "head_dim=32", "hidden=128", "tie")
STEPS = 250  # some two minutes on one thread
JUDGED = 100  # steps, before which nothing is claimed of the losses
APART = 1e-3  # of the parameters
GROWS = 1.5  # times, over the blocks
AGAIN = 3  # steps that are run twice
ROWS = 10  # of the table of losses
PROMPT, SAMPLE, TRACED = b"HAMLET.\n", 240, 48  # bytes
Pair = tuple[Learned, Learned]


def models(given: Setting) -> tuple[Model, Model]:
    """The two descriptions."""
    old = given.small("transformer-base", *SIZES, *OLDER)
    return old, matched(given.small("llama-3-8b", *SIZES, *NEWER), old.total())


def matched(model: Model, total: int) -> Model:
    """`model` with the feed-forward width that brings its parameters nearest to `total`."""
    def parameters(width: int) -> int:
        return apply(model, f"ffn={width}").total()

    each = parameters(2) - parameters(1)  # a count is linear in the width
    near = max(1, round((total - parameters(1)) / each) + 1)
    return apply(model, f"ffn={near}")


def run(given: Setting) -> Outcome:
    """Train both, then compare their losses, one traced text and what they write. On one CPU thread unless asked for
    more, so that a seed says every bit.
    """
    with on_threads(given.threads or 1):
        return _run(given)


def _run(given: Setting) -> Outcome:
    pair = models(given)
    recipe = Recipe(steps=given.steps or STEPS)
    data = windows(given.text, recipe, given.draws())
    made = tuple(_learned(m, name, recipe, data, given) for m, name in zip(pair, (OLD, NEW), strict=True))
    both: Pair = (made[0], made[1])
    ids = data.held[:1, :TRACED].to(given.device)
    traces = (trace(both[0].net, ids), trace(both[1].net, ids))
    fresh = tuple(_growth(trace(network(m, given.draws(), given.device), ids)) for m in pair)
    traced = printable(_said(bytes(ids[0].tolist())))
    return Outcome(
        claims=(Claim(claim="both have the same number of parameters, to within 1 in 1,000",
                      formula="|P_2024 - P_2017| / P_2017",
                      findings=tuple(_parameters(*pair))),
                Claim(claim="the block of 2024 learns more from the same batches in the same steps",
                      formula="mean of -ln p of a byte after those before it, in text that neither was trained on",
                      findings=tuple(_losses(both, recipe, given))),
                Claim(claim="the same seed and batches give the same losses to the last bit, on one thread",
                      formula="losses(run 1) = losses(run 2)", findings=tuple(_again(pair, recipe, data, given))),
                Claim(claim="after-norm holds the stream at one size; pre-norm lets it grow from block to block",
                      formula="RMS of the stream after a block", findings=tuple(_stream(traces, fresh)))),
        grids=(_features(pair), _table(both),
               side_by_side(f"{TRACED} bytes of the held-out text, stage by stage: \"{traced}\"", (OLD, NEW), *traces)),
        charts=(Chart(title="training loss", across="step", up="nats per byte", lines=tuple(
            Line(name=name, at=tuple(range(1, 1 + len(x.losses))), values=x.losses)
            for name, x in zip((OLD, NEW), both, strict=True))),),
        passages=tuple(Passage(title=f"{name} writes", text=_sample(x.net, given))
                       for name, x in zip((OLD, NEW), both, strict=True)))


def _learned(model: Model, name: str, recipe: Recipe, data: Windows, given: Setting) -> Learned:
    return learn(model, recipe, data, given.draws(), given.device,
                 lambda n: given.tell(f"blocks: training {name}, step {n} of {recipe.steps}"))


def _parameters(old: Model, new: Model) -> Iterator[Finding]:
    for name, m in ((OLD, old), (NEW, new)):
        yield found(f"parameters of {name}", m.total(), of="its description", unit="parameters")
    share = abs(new.total() - old.total()) / old.total()
    yield found("share by which they differ", share, of="the two", expected=APART, relation="<=", ours=True,
                note=f"{new.total() - old.total():+,}: one more column of the feed-forward would be "
                f"{apply(new, f'ffn={_width(new) + 1}').total() - old.total():+,}")


def _width(model: Model) -> int:
    return int(getattr(model.layers[0].mlp, "ffn", 0))


def _losses(both: Pair, recipe: Recipe, given: Setting) -> Iterator[Finding]:
    of, threads = f"{given.text_name}, last tenth, {len(both[0].held)} windows", torch.get_num_threads()
    where = f"trained on {threads} CPU thread{'' if threads == 1 else 's'}" if given.device.type == "cpu" else None
    for name, x in zip((OLD, NEW), both, strict=True):
        yield found(f"loss of {name} after {recipe.steps:,} steps", float(x.held.mean()), of=of, unit="nats per byte",
                    spread=x.held.tolist(), note=where)
    apart = both[1].held - both[0].held
    error = float(apart.std()) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
    early = recipe.steps < JUDGED
    note = f"standard error {error:.2g}, window by window; of one seed, at this size and after so many steps"
    yield found(f"loss of {NEW} less that of {OLD}", float(apart.mean()), of=of, unit="nats per byte",
                spread=apart.tolist(), expected=None if early else 0.0, relation="<=",
                note=f"{note}; not judged before {JUDGED} steps" if early else note)


def _again(pair: tuple[Model, Model], recipe: Recipe, data: Windows, given: Setting) -> Iterator[Finding]:
    """The first steps of both, twice, on one thread."""
    few = Windows(list(islice(data.batches, AGAIN)), data.held[:1])
    cpu = given.device.type == "cpu"
    with on_threads(1 if cpu else None):
        for name, model in zip((OLD, NEW), pair, strict=True):
            a, b = (learn(model, recipe, few, given.draws(), given.device).losses for _ in range(2))
            yield found(f"{name}: largest difference of {len(a)} steps, run twice",
                        max(abs(x - y) for x, y in zip(a, b, strict=True)), unit="nats per byte", expected=0.0,
                        of="cpu, 1 thread" if cpu else given.device.type)


def _stream(traces: tuple[dict[str, Stage], dict[str, Stage]], fresh: Sequence[float]) -> Iterator[Finding]:
    """After training, and `fresh`, before it: drawn branches add as much as trained ones."""
    of = f"{TRACED} traced bytes"
    for name, stages, relation, start in zip((OLD, NEW), traces, ("<=", ">="), fresh, strict=True):
        there = name == NEW and start >= GROWS
        yield found(f"{name}: stream after the last block / after the first", _growth(stages), of=of,
                    expected=GROWS, relation=relation, ours=True,
                    note="there from the start: before the first step it has grown so already" if there else None)
        yield found(f"{name}: that before the first step", start, of=of)


def _growth(stages: dict[str, Stage]) -> float:
    """RMS of the stream after the last block over that after the first."""
    first, *_, last = [s.rms for k, s in stages.items() if k.startswith("after block")]
    return last / first


def _features(pair: tuple[Model, Model]) -> Grid:
    told = [dict(features(m)) for m in pair]
    rows = tuple((name, *(t[name] for t in told)) for name in shown(told))
    return Grid(title="what they are made of", columns=("part", OLD, NEW), rows=rows)


def _table(both: Pair) -> Grid:
    """Means over equal stretches of steps."""
    n = len(both[0].losses)
    edges = [round(k * n / min(ROWS, n)) for k in range(min(ROWS, n) + 1)]
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (f"{a + 1:,}-{b:,}" if b > a + 1 else f"{b:,}", *(round(_mean(x.losses[a:b]), 4) for x in both))
                 for a, b in zip(edges, edges[1:], strict=False))
    return Grid(title="training loss, nats per byte, mean over steps", columns=("steps", OLD, NEW), rows=rows)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _sample(net: Decoder, given: Setting) -> str:
    """What follows the prompt, drawn with the seed."""
    cache = Cache(net.model, 1, len(PROMPT) + SAMPLE, dtype=torch.float32, device=given.device)
    made = generate(net, list(PROMPT), max_new=SAMPLE, sampling=Sampling(temperature=0.8, seed=given.seed), cache=cache)
    return _said(PROMPT + bytes(made.tokens))


def _said(raw: bytes) -> str:
    """ASCII, other bytes as escapes: a network of bytes writes what is no character, and an excerpt may begin in one.
    """
    return raw.decode("ascii", "backslashreplace")
