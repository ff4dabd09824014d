"""Mixtures of experts in the network, held to transformers' own modules and to the logits of the goldens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.net.blocks import FeedForward
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.net.moe import MoEBlock, Router
from llamactl.spec.model import Model
from llamactl.spec.parts import MLP, MoE
from llamactl.spec.routing import Routing

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    return data


@lru_cache
def model(name: str) -> Model:
    return arch.describe(config(name), name)


def mixtures(m: Model) -> list[tuple[int, MoE]]:
    return [(i, layer.mlp) for i, layer in enumerate(m.layers) if isinstance(layer.mlp, MoE)]


NAMES = [p.name for p in sorted(GOLDEN.iterdir()) if (p / "config.json").exists() and mixtures(model(p.name))]
UNDESCRIBED = {"gemma4"}  # its router has a norm and scales of its own
ROUTED = [name for name in NAMES if name not in UNDESCRIBED]
# Why a whole model is not compared here; its mixtures are, block by block.
PARTLY = {
    **dict.fromkeys(("jamba", "lfm2_moe", "lfm2_moe-untied", "nemotron_h-moe", "qwen3_5_moe", "qwen3_5_moe_text",
                     "qwen3_next", "qwen3_next-bias"), "state-space and linear-attention layers"),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), "sparse attention"),
    **dict.fromkeys(("llama4", "llama4_text"), None),  # its attention is not this file's
}
LENGTH = {"phimoe": 16}  # past it transformers keeps the short factors, the published code takes the long ones


class Held:
    """A golden's canonical tensors as a source of weights."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@pytest.fixture(scope="session")
def weights(content: ModuleType) -> Callable[[str], dict[str, Tensor]]:
    @lru_cache
    def read(name: str) -> dict[str, Tensor]:
        built = content.built(name)
        out: dict[str, Tensor] = content.canonical(built, arch.names(built.model))
        return out

    return read


@pytest.fixture(scope="session")
def hf(make_golden: ModuleType) -> Callable[[str], list[nn.Module]]:
    """transformers' mixtures of a golden, in the order of layers."""

    @lru_cache
    def modules(name: str) -> list[nn.Module]:
        whole = make_golden.build(GOLDEN / name)
        found = [m for m in whole.modules() if any("Experts" in type(c).__name__ for c in m.children())]
        return [m for m in found if any("Router" in type(c).__name__ for c in m.children())]

    return modules


def block(part: MoE, i: int, held: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> MoEBlock:
    """Layer i's mixture with its weights."""
    out = MoEBlock(part, dtype=dtype)
    for leaf in part.leaves():
        for e in range(leaf.copies):
            path = leaf.path.replace("{e}", str(e))
            value, at = held[f"layers.{i}.mlp.{path}"], out.get_submodule(path.rpartition(".")[0])
            if leaf.kind == "buffer":
                assert path.rpartition(".")[2] in at._buffers
                setattr(at, path.rpartition(".")[2], value)
            else:
                setattr(at, path.rpartition(".")[2], nn.Parameter(value.to(dtype), requires_grad=False))
    assert not any(p.is_meta for p in (*out.parameters(), *out.buffers()))
    return out


def inputs(n: int, hidden: int, size: float = 1.0) -> Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(7)) * size


def theirs(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = module(x[None])
    y: Tensor = out[0] if isinstance(out, tuple) else out
    return y.reshape(x.shape)


def off(ours: Tensor, other: Tensor) -> float:
    return float((ours - other).abs().max() / other.abs().max())


def worst(name: str, held: dict[str, Tensor], modules: list[nn.Module], change: dict[str, Any] | None = None,
          size: float = 1.0) -> float:
    """How far the golden's mixtures are from transformers', many tokens at once and each alone."""
    found = []
    for (i, part), module in zip(mixtures(model(name)), modules, strict=True):
        assert part.routing
        ours = block(replace(part, routing=replace(part.routing, **change or {})), i, held)
        x = inputs(40, part.hidden, size)
        want = theirs(module, x)
        found += [off(ours(x.view(2, 20, -1)).view(x.shape), want), *(off(ours(x[n]), want[n]) for n in range(5))]
    return max(found)


@pytest.mark.parametrize("name", ROUTED)
def test_blocks(name: str, weights: Any, hf: Any) -> None:
    assert worst(name, weights(name), hf(name)) < 1e-5


@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "minimax_m2"])
def test_blocks_on_large_numbers(name: str, weights: Any, hf: Any) -> None:
    """Where gpt-oss's experts are clamped and a sigmoid is close to one."""
    assert worst(name, weights(name), hf(name), size=12.0) < 1e-5


# field -> a golden that shows it, and another value
CHANGES: dict[str, tuple[str, Any]] = {
    "score": ("qwen3_moe", "sigmoid"), "over": ("gpt_oss", "all"), "normalise": ("mixtral", False),
    "eps": ("deepseek_v3", 0.1), "floor": ("ernie4_5_moe", 2.0), "scale": ("deepseek_v2", 1.0),
    "groups": ("deepseek_v3", 2), "groups_kept": ("deepseek_v3", 3), "group_score": ("deepseek_v3", "max"),
    "scales_input": ("llama4_text", False), "jitter": ("phimoe", 0.4),
}
IN_BF16 = {"fp32", "weights_fp32"}


def test_every_field_of_routing_is_shown() -> None:
    assert {f.name for f in fields(Routing)} == CHANGES.keys() | IN_BF16


@pytest.mark.parametrize("field", CHANGES)
def test_a_wrong_routing_is_seen(field: str, weights: Any, hf: Any) -> None:
    name, value = CHANGES[field]
    for _, part in mixtures(model(name)):
        assert getattr(part.routing, field) != value
    assert worst(name, weights(name), hf(name), {field: value}) > 1e-3


def test_groups_by_their_best_expert(weights: Any, make_golden: ModuleType) -> None:
    """One group of four, so that the second expert is not always where the second best score is."""
    whole = make_golden.build(GOLDEN / "deepseek_v2")
    (i, part), module = mixtures(model("deepseek_v2"))[0], whole.model.layers[1].mlp
    assert part.routing
    module.gate.topk_group = 1
    x = inputs(40, part.hidden)
    for kept, close in ((1, True), (2, False)):
        ours = block(replace(part, routing=replace(part.routing, groups_kept=kept)), i, weights("deepseek_v2"))
        assert (off(ours(x), theirs(module, x)) < 1e-5) == close


@pytest.mark.parametrize("field", ["limit", "alpha"])
def test_a_wrong_clamp_is_seen(field: str, weights: Any, hf: Any) -> None:
    ((i, part), *_), (module, *_) = mixtures(model("gpt_oss")), hf("gpt_oss")
    assert (part.expert.limit, part.expert.alpha) == (7.0, 1.702)
    wrong = replace(part, expert=replace(part.expert, **{field: 1.5}))
    x = inputs(40, part.hidden, 12.0)
    assert off(block(wrong, i, weights("gpt_oss"))(x), theirs(module, x)) > 1e-3


def test_the_correction_bias_is_for_the_choice_alone(weights: Any, hf: Any) -> None:
    ((i, part), *_), (module, *_) = mixtures(model("minimax_m2")), hf("minimax_m2")
    ours, x = block(part, i, weights("minimax_m2")), inputs(40, part.hidden)
    assert off(ours(x), theirs(module, x)) < 1e-5
    assert ours.router.correction_bias is not None
    ours.router.correction_bias = torch.zeros(part.n_experts)
    assert off(ours(x), theirs(module, x)) > 1e-3


# --- bf16: what stays in fp32 decides between close experts


def routed(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' weights and experts for bf16 rows, in its order of experts, by each family's own call."""
    router = next(m for m in module.children() if "Router" in type(m).__name__)
    state = {**dict(module.named_buffers()), **dict(module.named_parameters())}
    bias = next((v for k, v in state.items() if k.endswith(("e_score_correction_bias", "expert_bias"))), None)
    with torch.no_grad():
        if hasattr(module, "route_tokens_to_experts"):
            weights, chosen = module.route_tokens_to_experts(router(x))
            return weights, chosen
        takes = "MiniMaxM2" in type(module).__name__ or "Lfm2Moe" in type(module).__name__
        out = router(x, bias) if takes else router(x)
    if "Llama4" in type(module).__name__:
        chosen = out[1].topk(router.top_k, dim=-1).indices
        return out[0].gather(-1, chosen), chosen
    return out[1], out[2]


def in_bf16(name: str, make_golden: ModuleType) -> list[nn.Module]:
    """transformers' mixtures with bf16 matrices; buffers, and weights that are not trained, stay in fp32."""
    whole = make_golden.build(GOLDEN / name)
    for p in whole.parameters():
        if p.requires_grad:
            p.data = p.data.bfloat16()
    found = [m for m in whole.modules() if any("Experts" in type(c).__name__ for c in m.children())]
    return [m for m in found if any("Router" in type(c).__name__ for c in m.children())]


def bf16_faults(name: str, held: dict[str, Tensor], make_golden: ModuleType, change: dict[str, Any] | None = None
                ) -> list[str]:
    out = []
    for (i, part), module in zip(mixtures(model(name)), in_bf16(name, make_golden), strict=True):
        assert part.routing
        ours = block(replace(part, routing=replace(part.routing, **change or {})), i, held, torch.bfloat16)
        x = inputs(600, part.hidden).bfloat16()
        (weights, chosen), (want, at) = ours.router(x), routed(module, x)
        out += ["type of the weights"] if weights.dtype != want.dtype else []
        mine = torch.zeros(600, part.n_experts).scatter_(-1, chosen, weights.float())
        other = torch.zeros(600, part.n_experts).scatter_(-1, at, want.float())
        if part.routing.score != "sparsemixer":
            out += ["choice"] if ((mine != 0) != (other != 0)).any() else []
        rough = part.routing.fp32 == "none" and part.routing.normalise  # they round after each step, we once
        near = 1e-6 if weights.dtype == torch.float32 else 2**-7 if rough else 2**-8
        both = (mine != 0) & (other != 0)
        out += ["weights"] if ((mine - other).abs() > near * other)[both].any() else []
    return out


@pytest.mark.parametrize("name", ROUTED)
def test_routers_in_bf16(name: str, weights: Any, make_golden: ModuleType) -> None:
    assert bf16_faults(name, weights(name), make_golden) == []


@pytest.mark.parametrize(("name", "field", "value"), [
    ("deepseek_v3", "fp32", "score"), ("ernie4_5_moe", "fp32", "none"), ("mixtral", "fp32", "logits"),
    ("mixtral", "weights_fp32", False), ("qwen3_moe", "weights_fp32", True),
])
def test_a_wrong_precision_is_seen(name: str, field: str, value: Any, weights: Any, make_golden: ModuleType) -> None:
    assert bf16_faults(name, weights(name), make_golden, {field: value}) != []


def test_the_fp32_matrix_of_a_router_follows_its_weight() -> None:
    part = MoE(hidden=8, n_experts=4, top_k=1, expert=MLP(hidden=8, ffn=4, activation="silu"))
    router = Router(part, Routing(fp32="logits"), dtype=torch.bfloat16, device="cpu")
    x = torch.eye(8, dtype=torch.bfloat16)
    for value in (1.0, 2.0):
        router.weight = nn.Parameter(torch.full((4, 8), value, dtype=torch.bfloat16), requires_grad=False)
        assert router.logits(x).eq(value).all()


# --- whole models


@pytest.fixture(scope="session")
def decoder(weights: Any) -> Callable[[str], Decoder]:
    def made(name: str) -> Decoder:
        out = build(model(name))
        out.assign(Held(weights(name)))
        return out

    return made


@pytest.mark.parametrize("name", [name for name in ROUTED if name not in PARTLY])
def test_logits(name: str, decoder: Any) -> None:
    """All tokens at once, in two pieces, and one by one after the cache."""
    said = json.loads((GOLDEN / name / "logits.json").read_text(encoding="utf-8"))
    n = LENGTH.get(name, len(said["ids"]))
    ids, want, net = torch.tensor([said["ids"][:n]]), torch.tensor(said["logits"][:n]), decoder(name)
    assert (net(ids)[0] - want).abs().max() < 2e-4
    for cuts in ([0, 9, n], [0, *range(7, n + 1)]):
        cache = Cache(model(name), 1, n, dtype=torch.float32)
        pieces = [net(ids[:, a:b], cache) for a, b in zip(cuts, cuts[1:], strict=False)]
        assert (torch.cat(pieces, 1)[0] - want).abs().max() < 2e-4


@pytest.mark.parametrize("name", [name for name, why in PARTLY.items() if why])
def test_other_parts_are_refused(name: str) -> None:
    with pytest.raises(InputRefused, match=str(PARTLY[name])) as e:
        build(model(name))
    assert e.value.code == "not-runnable"


def test_a_correction_bias_stays_in_fp32(weights: Any) -> None:
    net = build(model("deepseek_v3"), dtype=torch.bfloat16)
    net.assign(Held(weights("deepseek_v3")), dtype=torch.bfloat16)
    biases = [b for name, b in net.named_buffers() if name.endswith("router.correction_bias")]
    assert len(biases) == 2
    assert {b.dtype for b in biases} == {torch.float32}


# --- only the experts that a token chose


@pytest.mark.parametrize("tokens", [1, 3])
def test_only_chosen_experts_are_read(tokens: int, weights: Any) -> None:
    name = "qwen3_moe"
    i, part = mixtures(model(name))[0]
    ours, x = block(part, i, weights(name)), inputs(tokens, part.hidden)
    used: list[int] = []
    for e, expert in enumerate(ours.experts):
        expert.register_forward_hook(lambda _m, _i, _o, e=e: used.append(e))
    chosen = ours.router(x)[1]
    ours(x)
    assert sorted(used) == sorted(set(chosen.flatten().tolist()))
    assert len(used) < part.n_experts


# --- reading


def routing(name: str, **changes: Any) -> Routing | None:
    """The routing that a golden's config describes with other words in it; `...` takes one out."""
    data = config(name)
    inner = data.get("text_config", data)
    for key, value in changes.items():
        if value is ...:
            inner.pop(key, None)
        else:
            inner[key] = value
    (found,) = {part.routing for _, part in mixtures(arch.describe(data, name))}
    return found


@pytest.mark.parametrize(("name", "changes", "field", "value"), [
    ("qwen3_moe", {"norm_topk_prob": ...}, "normalise", False),
    ("qwen3_moe", {"norm_topk_prob": True}, "normalise", True),
    ("qwen3_moe", {"norm_topk_prob": None}, "normalise", False),
    ("qwen2_moe", {"norm_topk_prob": ...}, "normalise", False),
    ("qwen3_next", {"norm_topk_prob": ...}, "normalise", True),
    ("olmoe", {"norm_topk_prob": ...}, "normalise", False),
    ("dots1", {"norm_topk_prob": ...}, "normalise", False),
    ("glm4_moe", {"norm_topk_prob": ...}, "normalise", True),
    ("glm4_moe", {"n_group": ..., "topk_group": ...}, "groups", 1),
    ("deepseek_v3", {"norm_topk_prob": None}, "normalise", False),
    ("deepseek_v3", {"norm_topk_prob": ...}, "normalise", True),
    ("deepseek_v3", {"n_group": ...}, "groups", 8),
    ("deepseek_v3", {"topk_group": ...}, "groups_kept", 4),
    ("deepseek_v3", {"routed_scaling_factor": ...}, "scale", 2.5),
    ("deepseek_v2", {"routed_scaling_factor": ...}, "scale", 1.0),
    ("deepseek_v2", {"topk_method": ...}, "groups", 1),
    ("deepseek_v2", {"topk_method": "greedy", "n_group": 4}, "groups", 1),
    ("deepseek_v32", {"n_group": ...}, "groups", 8),
    ("glm_moe_dsa", {"n_group": ...}, "groups", 1),
    ("nemotron_h-moe", {"routed_scaling_factor": ...}, "scale", 1.0),
    ("lfm2_moe", {"norm_topk_prob": ...}, "normalise", True),
    ("ernie4_5_moe", {"moe_norm_min": ...}, "floor", 1e-12),
    ("ernie4_5_moe", {"moe_norm_min": 0.5}, "floor", 0.5),
    ("phimoe", {"router_jitter_noise": ...}, "jitter", 0.01),
    ("phimoe", {"router_jitter_noise": 0.2}, "jitter", 0.2),
])
def test_reading(name: str, changes: dict[str, Any], field: str, value: Any) -> None:
    found = routing(name, **changes)
    assert found
    assert getattr(found, field) == value


@pytest.mark.parametrize(("name", "changes"), [
    ("deepseek_v2", {"norm_topk_prob": True}), ("deepseek_v2", {"scoring_func": "sigmoid"}),
    ("deepseek_v2", {"topk_method": None}), ("deepseek_v2", {"topk_method": "noaux_tc"}),
    ("deepseek_v2", {"n_group": None}), ("deepseek_v2", {"routed_scaling_factor": None}),
    ("deepseek_v3", {"scoring_func": "softmax"}), ("deepseek_v3", {"n_group": None}),
    ("minimax_m2", {"scoring_func": "softmax"}), ("qwen3_vl_moe", {"norm_topk_prob": False}),
    ("qwen3_5_moe_text", {"norm_topk_prob": False}), ("ernie4_5_moe", {"moe_norm_min": None}),
    ("lfm2_moe", {"routed_scaling_factor": None}), ("phimoe", {"router_jitter_noise": None}),
])
def test_what_the_familys_code_does_not_do_is_counted_but_not_run(name: str, changes: dict[str, Any]) -> None:
    assert routing(name, **changes) is None
    data = config(name)
    data.get("text_config", data).update(changes)
    assert arch.describe(data, name).total() == model(name).total()


def test_dbrx_may_leave_its_weights_as_they_are() -> None:
    data = config("dbrx")
    data["ffn_config"] = {**data["ffn_config"], "moe_normalize_expert_weights": None}
    ((_, part), *_) = mixtures(arch.describe(data, "dbrx"))
    assert part.routing == Routing(normalise=False, fp32="none")


@pytest.mark.parametrize(("key", "value"), [("norm_topk_prob", "yes"), ("n_group", 2.5), ("routed_scaling_factor", -1),
                                            ("routed_scaling_factor", True), ("n_group", 0)])
def test_nonsense_is_refused(key: str, value: Any) -> None:
    with pytest.raises(InputRefused, match=key):
        arch.describe({**config("deepseek_v3"), key: value}, "c")


# --- refusals


PART = MoE(hidden=8, n_experts=6, top_k=2, expert=MLP(hidden=8, ffn=4, activation="silu"))


@pytest.mark.parametrize(("how", "message"), [
    (None, "2 of its 6 experts are chosen"),
    (Routing(score="hash"), "score is 'hash'"),
    (Routing(over="some"), "over is 'some'"),
    (Routing(group_score="mean"), "group score is 'mean'"),
    (Routing(fp32="half"), "fp32 is 'half'"),
    (Routing(groups=4, groups_kept=4), "6 experts in 4 groups"),
    (Routing(groups=3, groups_kept=4), "of which 4 are kept"),
    (Routing(groups=6, groups_kept=1), "2 from 6 experts in 6 groups, of which 1 are kept"),
    (Routing(groups=6, groups_kept=3, group_score="top2"), "6 experts in 6 groups"),
])
def test_a_choice_that_cannot_be_made_is_refused(how: Routing | None, message: str) -> None:
    with pytest.raises(InputRefused, match=re.escape(message)) as e:
        MoEBlock(replace(PART, routing=how), dtype=torch.float32)
    assert e.value.code == "not-runnable"


@pytest.mark.parametrize("how", [Routing(over="chosen"), Routing(score="sparsemixer")])
def test_a_correction_that_would_be_ignored_is_refused(how: Routing) -> None:
    MoEBlock(replace(PART, routing=how), dtype=torch.float32)
    for part in (replace(PART, routing=how, correction_bias=True), replace(PART, routing=replace(how, groups=2))):
        with pytest.raises(InputRefused, match="ranks logits"):
            MoEBlock(part, dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(UNDESCRIBED))
def test_a_routing_that_is_not_described_is_refused(name: str) -> None:
    _, part = mixtures(model(name))[0]
    with pytest.raises(InputRefused, match="routing of this config is not described"):
        MoEBlock(part, dtype=torch.float32)


def test_the_clamp_of_a_gate_is_above_alone() -> None:
    """With an alpha at which a gate far below zero still counts."""
    ff = FeedForward(MLP(hidden=1, ffn=1, activation="swigluoai", limit=1.0, alpha=0.2), dtype=torch.float32)
    for path in ("gate", "up", "down"):
        ff.get_submodule(path).weight = nn.Parameter(torch.ones(1, 1), requires_grad=False)
    x = torch.tensor([[-3.0], [-0.5], [0.5], [3.0]])
    gate, up = torch.tensor([[-3.0], [-0.5], [0.5], [1.0]]), torch.tensor([[-1.0], [-0.5], [0.5], [1.0]])
    want = gate * torch.sigmoid(0.2 * gate) * (up + 1)
    assert torch.allclose(ff(x), want)
    ff.get_submodule("up").weight = nn.Parameter(torch.zeros(1, 1), requires_grad=False)
    assert torch.allclose(ff(x), gate * torch.sigmoid(0.2 * gate))


def test_a_clamped_activation_needs_its_numbers() -> None:
    with pytest.raises(InputRefused, match="'swigluoai'"):
        FeedForward(MLP(hidden=8, ffn=4, activation="swigluoai"), dtype=torch.float32)


def test_parameter_names_are_the_leaves() -> None:
    for name in ROUTED:
        for _, part in mixtures(model(name)):
            want = {leaf.path.replace("{e}", str(e)): leaf.kind for leaf in part.leaves() for e in range(leaf.copies)}
            made = MoEBlock(part, dtype=torch.float32)
            found = {**dict.fromkeys(dict(made.named_parameters()), "param"),
                     **dict.fromkeys(dict(made.named_buffers()), "buffer")}
            assert found == want
