"""Losses of trained weights under edits, held against plain torch on the same networks; and what must not change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from llamactl import arch
from llamactl.analysis.ablation import Ablation, NormInput, ranked, summary
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.edits import apply
from llamactl.verify import ablate as room
from llamactl.verify.ablate import Ablated, ablate
from llamactl.verify.ablations import ABLATIONS, chosen, same, words
from llamactl.verify.trained import NewWeights, Trained

MODELS = ("llama", "gpt2", "gemma2", "mixtral", "falcon", "olmo2", "phi", "qwen3", "deepseek_v3", "gpt_oss",
          "starcoder2", "cohere", "ministral3", "mistral", "gemma", "gptj")


class Counted:
    """Tensors, and how often each was asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.asked: dict[str, int] = {}

    def tensor(self, name: str) -> Tensor:
        self.asked[name] = self.asked.get(name, 0) + 1
        return self.tensors[name]


def found(g: Any, edits: Sequence[str], *, shifts: Sequence[int] = (), source: Any = None) -> Ablated:
    return ablate(g.model, source or Counted(g.tensors), g.ids[0].tolist(), edits=edits, shifts=shifts)


def rows(g: Any, edits: Sequence[str], **more: Any) -> dict[str, Ablation]:
    return {x.edit: x for x in found(g, edits, **more).rows}


def nats(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="none")


@pytest.mark.parametrize(("name", "edit"), [
    ("llama", "gate=false"), ("llama", "gelu"), ("llama", "rope_theta=100"), ("llama", "window=4"),
    ("gpt2", "activation=relu"), ("gpt2", "bias_dropped=qkv"), ("gemma2", "logits_softcap=none"),
])
def test_a_loss_is_cross_entropy_and_its_change_is_paired(name: str, edit: str, networks: ModuleType) -> None:
    g = networks.golden(name)
    model = apply(g.model, edit)
    before, after = g.net(g.ids), networks.network(model, g.tensors)(g.ids)
    a, b = nats(before, g.ids), nats(after, g.ids)
    got = found(g, [edit])
    (row,) = got.rows
    assert got.base_loss == pytest.approx(float(a.mean()), abs=1e-6)
    assert (row.edit, row.kind, row.status) == (edit, "edit", "measured")
    assert row.loss == pytest.approx(float(b.mean()), abs=1e-6)
    assert row.change == pytest.approx(float((b - a).mean()), abs=1e-6)
    assert abs(float((b - a).mean())) > 1e-5
    assert row.change_percent == pytest.approx(100 * float((b - a).mean()) / float(a.mean()), rel=1e-3)
    assert row.standard_error == pytest.approx(float((b - a).std()) / math.sqrt(len(a)), rel=1e-3)
    assert row.max_abs_dlogit == pytest.approx(float((after - before).abs().max()), rel=1e-3)
    assert row.bit_equal is False


def test_blocks_of_logits_change_nothing(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    g = networks.golden("llama")
    whole = found(g, ["gelu"], shifts=(5,))
    monkeypatch.setattr(room, "LOGIT_BYTES", 4 * g.model.head.vocab * 5)  # five rows: 24 are four blocks and four rows
    parts = found(g, ["gelu"], shifts=(5,))
    assert parts.base_loss == pytest.approx(whole.base_loss, abs=1e-6)
    assert [x.edit for x in parts.rows] == [x.edit for x in whole.rows]
    assert [x.change for x in parts.rows] == pytest.approx([x.change for x in whole.rows], abs=1e-6)
    assert [x.max_abs_dlogit for x in parts.rows] == pytest.approx([x.max_abs_dlogit for x in whole.rows], rel=1e-2)
    assert [x.bit_equal for x in parts.rows] == [x.bit_equal for x in whole.rows]
    monkeypatch.setattr(room, "LOGIT_BYTES", 1)
    assert found(g, []).base_loss == pytest.approx(whole.base_loss, abs=1e-6)


def test_a_difference_in_any_block_counts(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tokens alone are past a window; with the blocks turned round the first ones would be."""
    g = networks.golden("llama")
    monkeypatch.setattr(room, "LOGIT_BYTES", 4 * g.model.head.vocab * 8)
    row = rows(g, ["window=20"])["window=20"]
    assert row.bit_equal is False
    blocks = room._blocks
    monkeypatch.setattr(room, "_blocks", lambda *given: reversed(list(blocks(*given))))
    again = rows(g, ["window=20"])["window=20"]
    assert again.bit_equal is False
    assert again.max_abs_dlogit == row.max_abs_dlogit > 0  # type: ignore[operator]


def test_small_weights_are_read_once_and_large_ones_never_kept(networks: ModuleType, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    g = networks.golden("llama")
    kept = Counted(g.tensors)
    first = found(g, ["gelu", "gate=false"], source=kept)
    assert set(kept.asked.values()) == {1}
    assert not first.streamed
    monkeypatch.setattr(room, "HELD_BYTES", 0)
    read = Counted(g.tensors)
    again = found(g, ["gelu", "gate=false"], source=read)
    assert again.streamed
    assert read.asked["layers.0.attn.q.weight"] == 4  # the model, two edits, the copy
    assert again._replace(streamed=False) == first


def test_weights_in_bf16_are_widened(networks: ModuleType) -> None:
    g = networks.golden("llama")
    low = {k: v.bfloat16() for k, v in g.tensors.items()}
    want = networks.network(g.model, {k: v.float() for k, v in low.items()})(g.ids)
    assert found(g, [], source=Counted(low)).base_loss == pytest.approx(float(nats(want, g.ids).mean()), abs=1e-6)


# --- what must not change


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gpt_oss", "olmo2", "starcoder2"])
def test_copied_kv_heads_are_the_same_model(name: str, networks: ModuleType) -> None:
    g = networks.golden(name)
    copy = found(g, []).kv_copy
    assert copy is not None
    assert copy.n_heads > copy.n_kv_heads
    assert copy.params == g.model.total() < copy.params_copied == apply(g.model, f"n_kv_heads={copy.n_heads}").total()
    assert copy.max_abs_dlogit is not None
    assert copy.max_abs_dlogit < networks.CLOSE
    assert copy.bit_equal is (copy.max_abs_dlogit == 0.0)


def test_copies_of_the_wrong_kv_heads_are_seen(networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    g = networks.golden("llama")
    right = Trained._regrouped

    def rolled(self: Trained, value: Tensor, old: int, new: int) -> Tensor:
        return right(self, value.roll(value.shape[0] // old, 0), old, new)

    monkeypatch.setattr(Trained, "_regrouped", rolled)
    copy = found(g, []).kv_copy
    assert copy is not None
    assert (copy.bit_equal, copy.max_abs_dlogit == 0.0) == (True, True) or copy.max_abs_dlogit > 0  # type: ignore[operator]
    monkeypatch.setattr(Trained, "_regrouped", lambda self, value, old, new: value.repeat(
        new // old, *([1] * (value.dim() - 1))))
    copy = found(g, []).kv_copy
    assert copy is not None
    assert not copy.bit_equal
    assert copy.max_abs_dlogit > 1e-2  # type: ignore[operator]


def test_no_copy_where_every_head_has_its_own(networks: ModuleType) -> None:
    assert found(networks.golden("gpt2"), []).kv_copy is None
    assert found(networks.golden("deepseek_v3"), []).kv_copy is None


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3", "gptj", "deepseek_v3"])
def test_rotated_positions_may_be_moved(name: str, networks: ModuleType) -> None:
    got = rows(networks.golden(name), [], shifts=(500, 5000))
    for by in (500, 5000):
        row = got[f"shift={by}"]
        assert row.kind == "shift"
        assert row.change == pytest.approx(0, abs=1e-4)
        assert 0 < row.max_abs_dlogit < 2e-2, "something was moved, and arithmetic alone saw it"  # type: ignore[operator]


def test_a_shift_of_q_alone_is_another_model(networks: ModuleType) -> None:
    row = rows(networks.golden("llama"), ["rope_shift=500"])["rope_shift=500"]
    assert row.max_abs_dlogit > 1e-2  # type: ignore[operator]


def test_learned_positions_may_not_be_moved_and_end(networks: ModuleType) -> None:
    g = networks.golden("gpt2")
    last = g.model.positions.rows - 24
    got = rows(g, [], shifts=(1, last, last + 1, 5000))
    for by in (1, last):
        assert abs(got[f"shift={by}"].change) > 1e-4  # type: ignore[arg-type]
        table = {**g.tensors, "pos_embed.weight": g.tensors["pos_embed.weight"].roll(-by, 0)}
        want = float(nats(networks.network(g.model, table)(g.ids), g.ids).mean())
        assert got[f"shift={by}"].loss == pytest.approx(want, abs=1e-6)
    for by in (last + 1, 5000):
        row = got[f"shift={by}"]
        assert (row.status, row.loss) == ("not-applicable", None)
        assert row.note == f"the table of positions ends at {last + 24}, before {by:,} + 24"


def test_distances_have_no_place_to_move_to(networks: ModuleType) -> None:
    row = rows(networks.golden("bloom"), [], shifts=(500,))["shift=500"]
    assert (row.status, row.change, row.note) == ("measured", 0.0, "no position is told here, only distances")


def test_sinusoids_are_not_moved(networks: ModuleType) -> None:
    g = networks.golden("llama")
    model = apply(g.model, "positions=sinusoidal")
    (row,) = ablate(model, Counted(g.tensors), g.ids[0].tolist(), edits=(), shifts=(5,)).rows
    assert row.status == "not-applicable"


# --- weights for edits


def test_fewer_kv_heads_are_means_of_neighbours(networks: ModuleType) -> None:
    g = networks.golden("llama")
    d, kv = g.model.layers[0].attn.head_dim, g.model.layers[0].attn.n_kv_heads
    trained = Trained(Counted(g.tensors), g.model, apply(g.model, "n_kv_heads=1"))
    for name in ("layers.0.attn.k.weight", "layers.1.attn.v.weight"):
        want = sum(g.tensors[name][i * d : (i + 1) * d] for i in range(kv)) / kv
        assert torch.allclose(trained.tensor(name), want)
    assert torch.equal(trained.tensor("layers.0.attn.q.weight"), g.tensors["layers.0.attn.q.weight"])
    assert list(trained.did) == [f"each KV head is the mean of {kv}"]
    assert rows(g, ["n_kv_heads=1"])["n_kv_heads=1"].note == f"each KV head is the mean of {kv}"


def test_more_kv_heads_are_copies_side_by_side(networks: ModuleType) -> None:
    g = networks.golden("starcoder2")  # with biases
    part = g.model.layers[0].attn
    trained = Trained(Counted(g.tensors), g.model, apply(g.model, f"n_kv_heads={part.n_heads}"))
    for name in ("layers.0.attn.k.weight", "layers.0.attn.k.bias"):
        each = part.n_heads // part.n_kv_heads
        old = g.tensors[name].split(part.head_dim)
        assert torch.equal(trained.tensor(name), torch.cat([h for h in old for _ in range(each)]))


@pytest.mark.parametrize(("name", "edit", "tensor"), [
    ("llama", "positions=learned", "pos_embed.weight"), ("gpt2", "gate", "layers.0.mlp.gate.weight"),
    ("llama", "ffn=40", "layers.0.mlp.gate.weight is"), ("llama", "n_layers=5", "layers.3."),
    ("llama", "n_heads=2", "layers.0.attn.q.weight is"), ("mixtral", "n_experts=7", "layers.0.mlp."),
    ("llama", "vocab=90", "embed.weight is"),
])
def test_weights_that_nobody_trained_are_not_made_up(name: str, edit: str, tensor: str, networks: ModuleType) -> None:
    row = rows(networks.golden(name), [edit])[edit]
    assert (row.status, row.loss, row.change, row.bit_equal) == ("not-applicable", None, None, None)
    assert str(row.note).startswith(f"needs new weights: {tensor}")


def test_an_unknown_tensor_is_not_made_up(networks: ModuleType) -> None:
    g = networks.golden("llama")
    trained = Trained(Counted(g.tensors), g.model, g.model)
    for name in ("layers.0.attn.q.bias", "layers.9.attn.q.weight", "x"):
        with pytest.raises(NewWeights):
            trained.tensor(name)


def test_new_biases_are_zero(networks: ModuleType) -> None:
    """LayerNorm with a bias of 0 is LayerNorm without one; biases of 0 on linear maps are none."""
    got = rows(networks.golden("llama"), ["layernorm", "norm_kind=layer", "biases"])
    assert got["layernorm"].change == pytest.approx(got["norm_kind=layer"].change, abs=1e-7)
    assert got["layernorm"].change != 0
    assert got["biases"].max_abs_dlogit < networks.CLOSE  # type: ignore[operator]
    assert "biases that are not in the weights are 0" in str(got["biases"].note)


def test_an_edit_that_changes_nothing_is_not_run(networks: ModuleType) -> None:
    g = networks.golden("llama")
    source = Counted(g.tensors)
    edits = ["silu", "norm=rms", "dropout=0.5"]
    room_rows = rows(g, edits, source=source)
    for edit in edits:
        row = room_rows[edit]
        assert (row.change, row.bit_equal, row.standard_error, row.note) == (0.0, True, 0.0,
                                                                             "the model is that way already")
    for edit in ("window=99", "context=16"):  # another model, the same numbers
        row = rows(g, [edit])[edit]
        assert (row.bit_equal, row.note) == (True, None)


def test_what_the_network_does_not_compute_is_a_row(networks: ModuleType) -> None:
    row = rows(networks.golden("gpt_oss"), ["no-gate"])["no-gate"]
    assert row.status == "not-applicable"
    assert "swigluoai" in str(row.note)


def test_an_edit_without_meaning_is_refused(networks: ModuleType) -> None:
    with pytest.raises(UsageError, match="no RoPE"):
        found(networks.golden("gpt2"), ["rope_theta=5"])


# --- NaN


def overflowing(g: Any) -> dict[str, Tensor]:
    """Weights near the end of fp32: an edit that multiplies them by 1e29 leaves it."""
    return {k: v * 1e10 if k.endswith("mlp.down.weight") else v for k, v in g.tensors.items()}


def test_an_edit_without_a_loss_is_said_and_stands_last(networks: ModuleType) -> None:
    g = networks.golden("llama")
    bad = "scaled=mlp.up.weight*1e29"
    got = found(g, ["positions=learned", bad, "gelu", "gate=false"], source=Counted(overflowing(g)))
    assert [x.status for x in got.rows] == ["measured", "measured", "not-finite", "not-applicable"]
    assert got.rows[0].change >= got.rows[1].change  # type: ignore[operator]
    row = got.rows[2]
    assert (row.edit, row.loss, row.change, row.change_percent, row.standard_error, row.bit_equal) == (
        bad, None, None, None, None, False)
    assert 0 < row.not_finite <= 23
    assert row.note == f"{row.not_finite} of 23 tokens have no finite loss"
    assert all(x is None or math.isfinite(x) for x in (row.max_abs_dlogit,))


def test_a_model_without_a_loss_is_refused(networks: ModuleType) -> None:
    g = networks.golden("llama")
    tensors = {**g.tensors, "layers.1.attn.v.weight": g.tensors["layers.1.attn.v.weight"] * math.nan}
    with pytest.raises(InputRefused, match=r"23 of 23 tokens have no finite loss, the first of them token 1") as caught:
        found(g, [], source=Counted(tensors))
    assert caught.value.code == "not-finite"


def test_rows_are_sorted_by_change() -> None:
    made = [Ablation(edit="n", status="not-applicable"), Ablation(edit="a", change=-0.1, loss=1.0),
            Ablation(edit="x", status="not-finite"), Ablation(edit="b", change=2.0, loss=3.0),
            Ablation(edit="c", change=0.0, loss=1.1)]
    assert [x.edit for x in ranked(made)] == ["b", "c", "a", "x", "n"]


# --- what norms read


def test_norm_inputs_are_those_of_the_model(networks: ModuleType) -> None:
    g = networks.golden("gemma2")  # with norms before and after
    seen: dict[tuple[int | None, str], Tensor] = {}
    hooks = []
    for i, block in enumerate(g.net.layers):
        for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
            hooks.append(getattr(block, name).register_forward_pre_hook(
                lambda _, x, at=(i, name): seen.__setitem__(at, x[0])))
    hooks.append(g.net.norm.register_forward_pre_hook(lambda _, x: seen.__setitem__((None, "norm"), x[0])))
    g.net(g.ids)
    for hook in hooks:
        hook.remove()
    norms = found(g, []).norms
    assert norms is not None
    assert [(x.layer, x.norm) for x in norms.norms] == list(seen)
    for x in norms.norms:
        read = seen[x.layer, x.norm].double()
        share = read.mean(-1).abs() / read.square().mean(-1).sqrt()
        assert x.median == pytest.approx(float(share.median()), rel=1e-3)
        assert x.worst == pytest.approx(float(share.max()), rel=1e-3)


def test_the_summary_of_norms() -> None:
    def norm(layer: int | None, median: float | None) -> NormInput:
        return NormInput(layer=layer, norm="norm" if layer is None else "attn_norm", median=median, worst=median)

    got = summary([norm(0, 0.3), norm(1, None), norm(2, 0.1), norm(None, 0.2)])
    assert got is not None
    assert (got.median, got.worst, got.worst_at) == (0.2, 0.3, "layers.0.attn_norm")
    assert len(got.norms) == 4
    even = summary([norm(0, 0.1), norm(None, 0.3)])
    assert even is not None
    assert (even.median, even.worst_at) == (pytest.approx(0.2), "norm")
    assert summary([norm(0, None)]) is None
    assert summary([]) is None


# --- the edits that are made unasked


@pytest.mark.parametrize("name", MODELS)
def test_the_default_edits_fit_the_model(name: str, networks: ModuleType) -> None:
    """Each has a meaning, changes the logits or says why not, and needs no weights that nobody trained."""
    g = networks.golden(name)
    edits = chosen(g.model)
    assert len(edits) >= 5
    got = rows(g, edits)
    assert set(got) == set(edits)
    for row in got.values():
        assert not str(row.note).startswith("needs new weights"), row
        assert row.status != "not-finite", row
    assert sum(row.status == "measured" and not row.bit_equal for row in got.values()) >= 5


def test_every_default_edit_fits_some_model(networks: ModuleType) -> None:
    described = [arch.describe(networks.config(n), n) for n in (*MODELS, "llama-bias-tied-llama3", "stablelm")]
    meta = apply(described[0], "rope_pairs=adjacent")
    used = {edit for model in (*described, meta) for edit in chosen(model)}
    assert set(ABLATIONS) - used == set()


def test_no_default_edit_leaves_the_model_as_it_is(networks: ModuleType) -> None:
    model = networks.golden("llama").model
    assert {"activation=silu", "rope_pairs=half", "norm_kind=rms"} & set(chosen(model)) == set()
    assert {"activation=silu"} <= set(chosen(networks.golden("gpt2").model))
    assert same(model, apply(model, "dropout=0.5"))
    assert not same(model, apply(model, "gelu"))
    assert not same(model, apply(model, "scaled=mlp.up.weight*2"))


def test_edits_in_plain_words(networks: ModuleType) -> None:
    model = networks.golden("llama").model
    assert words(model, "no-gate") == words(model, "gate=false") == "the feed-forward has no gate"
    assert "(tile)" in str(words(model, "kv-order=tile"))
    assert words(model, "positions=learned") is None
    assert words(model, "n_kv_heads=1") is None
    assert words(model, "no-such-edit") is None
