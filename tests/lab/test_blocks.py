"""The blocks of 2017 and 2024: equal in parameters, trained by the same batches, deterministic, traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

from llamactl import lab
from llamactl.analysis.experiment import Experiment
from llamactl.errors import InputRefused
from llamactl.lab import _training as training
from llamactl.lab import blocks
from llamactl.lab._training import Recipe, Windows, learn, windows
from llamactl.spec.edits import apply
from llamactl.spec.model import Model

CPU = torch.device("cpu")
SMALL = ("n_layers=2", "vocab=256", "head_dim=16", "n_heads=2", "hidden=32")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(setting: Any) -> tuple[Model, Model]:
    """Both blocks, very small."""
    given = setting()
    old = given.small("transformer-base", *SMALL, "ffn=128")
    new = given.small("llama-3-8b", "n_layers=2", "vocab=256", "n_kv_heads=1", *SMALL[2:], "tie")
    return old, blocks.matched(new, old.total())


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


RECIPE = Recipe(steps=30, batch=4, tokens=32, windows=8, rate=3e-3)


@pytest.fixture(scope="module")
def data() -> Windows:
    return windows(lab.excerpt(), RECIPE, draws())


def test_the_two_have_the_same_number_of_parameters(setting: Any, done: Callable[..., Experiment], pick: Any) -> None:
    old, new = blocks.models(setting())
    assert (old.total(), new.total()) == (823_808, 823_424)
    e = done("blocks")
    assert pick(e, "parameters of 2017").value == old.total()
    assert pick(e, "parameters of 2024").value == new.total()
    share = pick(e, "share by which they differ")
    assert share.value == pytest.approx(384 / 823_808)
    assert share.verdict == "holds"
    assert share.expected == 1e-3
    assert e.claims[0].claim.endswith("to within 1 in 1,000")
    assert "-384" in share.note
    assert "+1,152" in share.note
    features = next(g for g in e.grids if g.title == "what they are made of")
    said = {r[0]: r[1:] for r in features.rows}
    assert said["positions"] == ("fixed sinusoids, added at the input", "RoPE, base 500,000")
    assert said["norm"] == ("LayerNorm (scale and shift) after each sum", "RMSNorm (scale) before each branch")
    assert said["attention"] == ("MHA, 4 heads of 32", "GQA, 4 query heads share 2 KV heads of 32")


def test_no_other_width_comes_nearer(pair: tuple[Model, Model]) -> None:
    old, new = pair
    width = new.layers[0].mlp.ffn  # type: ignore[union-attr]
    off = {n: abs(apply(new, f"ffn={n}").total() - old.total()) for n in range(width - 3, width + 4)}
    assert min(off, key=lambda n: off[n]) == width


def test_two_runs_give_the_same_losses_to_the_last_bit(pair: tuple[Model, Model], data: Windows) -> None:
    for model in pair:
        few = Windows(list(islice(data.batches, 4)), data.held)
        a, b, c = (learn(model, RECIPE, few, draws(seed), CPU) for seed in (0, 0, 1))
        assert a.losses == b.losses
        assert torch.equal(a.held, b.held)
        assert a.losses != c.losses


def test_training_lowers_the_loss_of_both(pair: tuple[Model, Model], data: Windows) -> None:
    for model in pair:
        made = learn(model, RECIPE, data, draws(), CPU)
        assert len(made.losses) == 30
        assert 5 < made.losses[0] < 8  # ln 256 and the noise of drawn logits
        assert made.losses[-1] < made.losses[0] - 1.5
        assert float(made.held.mean()) < 4.5
        assert not any(p.requires_grad or p.grad is not None for p in made.net.parameters())


def test_what_is_learned_is_the_byte_that_comes_next(pair: tuple[Model, Model]) -> None:
    """A text that repeats itself is soon known by heart, forwards."""
    circle = bytes(range(64, 88)) * 1_000
    for model in pair:
        recipe = Recipe(steps=60, batch=4, tokens=32, windows=4, rate=3e-3)
        made = learn(model, recipe, windows(circle, recipe, draws()), draws(), CPU)
        assert float(made.held.mean()) < 0.5


def test_every_parameter_is_trained(pair: tuple[Model, Model], data: Windows) -> None:
    from llamactl.lab._drawn import Drawn

    for model in pair:
        made = learn(model, RECIPE, Windows(list(islice(data.batches, 2)), data.held[:1]), draws(), CPU)
        start = Drawn(model, draws())
        same = [n for n, p in made.net.named_parameters() if torch.equal(p, start.tensor(n))]
        assert same == []
        assert sum(p.numel() for p in made.net.parameters()) == model.total()


def test_gradients_are_the_slopes_of_the_loss(pair: tuple[Model, Model], data: Windows) -> None:
    """Along a step of each parameter, in fp64: what autograd says, and the difference of two losses."""
    from llamactl.lab._drawn import network
    from llamactl.lab._setting import by_autograd

    for model in pair:
        with by_autograd(CPU):
            net = network(model, draws()).double().requires_grad_(True)
            net.dtype = torch.float64
            net.forget()
            loss = training._loss(net, data.held[:2]).mean()
            loss.backward()
            for name, p in net.named_parameters():
                assert p.grad is not None, name
                step = p.grad / p.grad.norm() * 1e-2
                with torch.no_grad():
                    p += step
                    up = float(training._loss(net, data.held[:2]).mean())
                    p -= 2 * step
                    down = float(training._loss(net, data.held[:2]).mean())
                    p += step
                assert (up - down) / 2 == pytest.approx(float((p.grad * step).sum()), rel=2e-2), name


def test_a_run_that_is_not_deterministic_is_seen(pair: tuple[Model, Model], data: Windows, setting: Any,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f.verdict for f in blocks._again(pair, RECIPE, data, setting())] == ["holds", "holds"]
    right = training._loss
    monkeypatch.setattr(training, "_loss", lambda net, ids: right(net, ids) * (1 + 1e-6 * torch.rand(())))
    assert [f.verdict for f in blocks._again(pair, RECIPE, data, setting())] == ["differs", "differs"]


def test_the_report_of_a_short_run(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("blocks")
    (chart,) = e.charts
    assert [x.name for x in chart.lines] == ["2017", "2024"]
    assert all(x.at == (1, 2, 3) and len(x.values) == 3 for x in chart.lines)
    for name in ("2017", "2024"):
        assert pick(e, f"{name}: largest difference of 3 steps, run twice").value == 0
        held = pick(e, f"loss of {name} after 3 steps")
        assert (held.samples, held.unit) == (64, "nats per byte")
        assert held.lowest < held.value < held.highest
        assert held.note == "trained on 1 CPU thread"
    apart = pick(e, "loss of 2024 less that of 2017")
    assert (apart.verdict, apart.expected) == ("measured", None)
    assert "not judged before 100 steps" in apart.note
    assert apart.value == pytest.approx(pick(e, "loss of 2024 after").value - pick(e, "loss of 2017 after").value)
    for p in e.passages:
        assert p.text.startswith("HAMLET.\n")
        assert len(p.text) > 100


def test_one_text_is_traced_through_both(done: Callable[..., Experiment]) -> None:
    grid = next(g for g in done("blocks").grids if "stage by stage" in g.title)
    rows = {r[0]: r for r in grid.rows}
    inside = "attn_norm attn.q attn.k attn.v attn.o attn_post_norm mlp_norm mlp.gate mlp.up mlp.down mlp_post_norm"
    assert [r[0] for r in grid.rows] == ["into block 0", *(f"block 0: {x}" for x in inside.split()), *(
        f"after block {n}" for n in range(4)), "norm", "logits"]
    assert {k: r[-1] for k, r in rows.items() if r[-1]} == {
        "block 0: attn_norm": "2024", "block 0: attn_post_norm": "2017", "block 0: mlp_norm": "2024",
        "block 0: mlp.gate": "2024", "block 0: mlp_post_norm": "2017", "norm": "2024"}
    assert (rows["block 0: attn.k"][1], rows["block 0: attn.k"][4]) == ("48 x 128", "48 x 64")
    assert (rows["block 0: mlp.up"][1], rows["block 0: mlp.up"][4]) == ("48 x 512", "48 x 386")
    assert rows["after block 3"][2] == pytest.approx(1, abs=0.05)  # after a norm whose weights are nearly 1
    assert rows["after block 3"][5] > 1.2 * rows["after block 0"][5]
    last = lab.excerpt()[len(lab.excerpt()) * 9 // 10 :][:48].decode()
    assert grid.title == f"48 bytes of the held-out text, stage by stage: \"{last.encode('unicode_escape').decode()}\""


def test_the_stream_grows_before_the_first_step_already(done: Callable[..., Experiment], pick: Any, setting: Any
                                                        ) -> None:
    e = done("blocks")
    old, new = (pick(e, f"{n}: that before the first step") for n in ("2017", "2024"))
    assert (old.verdict, new.verdict) == ("measured", "measured")
    assert old.value < 1.2 < 1.5 < new.value
    after = pick(e, "2024: stream after the last block")
    assert (after.samples, after.lowest) == (1, None)  # four blocks of one text are no draws of a value
    assert after.note == "limit of ours; there from the start: before the first step it has grown so already"
    assert after.value != new.value
    assert pick(e, "2017: stream after the last block").note == "limit of ours"


def test_what_is_no_character_is_told_by_escapes(done: Callable[..., Experiment]) -> None:
    """A text of every byte: networks write them, and the traced bytes are some of them."""
    e = done("blocks", text="\u00e9\u4e2d\u202e".encode() * 3_000, steps=1)
    assert all(p.text.isascii() for p in e.passages)
    grid = next(g for g in e.grids if "stage by stage" in g.title)
    assert grid.title.isascii()
    assert "\\xe4\\xb8\\xad" in grid.title
    assert blocks._said(b"a\n\xff\xe2\x80") == "a\n\\xff\\xe2\\x80"


def test_a_text_that_is_too_short_is_refused(done: Callable[..., Experiment]) -> None:
    with pytest.raises(InputRefused, match="1,000 bytes"):
        done("blocks", text=b"x" * 1_000)


def test_held_out_text_is_never_trained_on() -> None:
    text = bytes(range(256)) * 100
    cut = len(text) * 9 // 10
    marked = b"a" * cut + b"b" * (len(text) - cut)
    got = windows(marked, Recipe(steps=5, batch=4, tokens=16, windows=4), draws())
    assert all(int(b.max()) == ord("a") for b in got.batches)
    assert int(got.held.min()) == ord("b")
    assert got.held.shape == (4, 17)


def test_a_batch_is_drawn_when_its_step_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is what all of them drawn at once would be, at every pass."""
    text, recipe = lab.excerpt(), Recipe(steps=5, batch=4, tokens=16)
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[: len(text) * 9 // 10].unfold(0, 17, 1)
    same = draws()
    at_once = [ids[torch.randint(len(ids), (4,), generator=same)] for _ in range(5)]
    got = windows(text, recipe, draws()).batches
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(got, at_once, strict=True))
    drawn = []
    right = torch.randint
    monkeypatch.setattr(torch, "randint", lambda *a, **k: drawn.append(1) or right(*a, **k))
    long = windows(text, Recipe(steps=1_000, batch=4, tokens=16), draws()).batches
    assert drawn == []
    assert torch.equal(next(iter(long)), at_once[0])
    assert drawn == [1]


def test_a_loss_that_is_no_number_ends_it(pair: tuple[Model, Model], data: Windows, monkeypatch: pytest.MonkeyPatch
                                          ) -> None:
    right = training._loss
    monkeypatch.setattr(training, "_loss", lambda net, ids: right(net, ids) * float("nan"))
    with pytest.raises(InputRefused, match="the loss of step 1 is nan"):
        learn(pair[0], RECIPE, data, draws(), CPU)


@pytest.mark.slow
def test_after_a_minute_the_block_of_2024_has_learned_more(done: Callable[..., Experiment], pick: Any) -> None:
    e = done("blocks", steps=None)
    old, new = (pick(e, f"loss of {n} after 250 steps").value for n in ("2017", "2024"))
    assert new < old - 0.1
    assert old < 2.6
    assert e.verdict == "holds"
    assert pick(e, "2017: stream after the last block").value < 1.5 < pick(e, "2024: stream after the last").value
