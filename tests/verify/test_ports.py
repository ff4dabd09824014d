"""Ports that are wrong in a known way are named; honest ones pass; a fault that no list holds gets no name."""

from __future__ import annotations

import fnmatch
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llamactl import arch
from llamactl.analysis.verification import Probe, Side, VerifyReport
from llamactl.net.streamed import logits
from llamactl.spec.model import Model
from llamactl.verify.compared import Setting, compared
from llamactl.verify.other import Other, ran

_SPEC = importlib.util.spec_from_file_location("llamactl_tests_ports", Path(__file__).with_name("ports.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
p: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["llamactl_tests_ports"] = p  # its dataclass asks for it
_SPEC.loader.exec_module(p)

TOKENS = 96
SIDE = Side(label="the checkpoint", kind="checkpoint", ref="x")
OFTEN = ("tiled-module", "swapped-module", "random_3-module", "gate_up_2-module", "eps-module", "gpt2_o_1-module",
         "dropped-module", "base-logits", "tiled-logits", "gelu-logits", "head_rows-logits")


@dataclass(frozen=True)
class Port:
    """names: edits (patterns) any of which is true. at: the layer, None for all, "model" for the ends or the order."""

    on: str
    make: Callable[[Any], object]
    names: tuple[str, ...] = ()
    at: int | str | None = None
    part: str = ""  # of the layer, told of a module
    blind: bool = False  # it cannot be found from logits alone


def of(on: str, make: Callable[[Any], object], *names: str, at: int | str | None = None, part: str = "",
       blind: bool = False) -> Port:
    return Port(on, make, names, at, part, blind)


def per_token_table(m: Any) -> None:
    w = m.transformer.wpe.weight.data
    p.put(w[:-1], w[1:])


WRONG = {
    "pairs": of("llama", lambda m: p.how(m, pairs="qk"), "rope_pairs=adjacent", "rope_rows=both:*"),
    "pairs_k_2": of("llama", lambda m: p.how(m, 2, pairs="k"), "rope_pairs=k", at=2, part="attention"),
    "backwards": of("llama", lambda m: p.how(m, sign=-1.0), "rope_direction=both"),
    "not_turned": of("llama", lambda m: p.how(m, turned=""), "positions=none", "rope_on=none"),
    "v_turned_1": of("llama", lambda m: p.how(m, 1, turned="qkv"), "rope_on=qkv", at=1, part="attention"),
    "one_off": of("llama", lambda m: p.how(m, moved={"q": 1}), "rope_shift=1"),
    "base": of("llama", lambda m: p.how(m, base=5e5), "rope_theta=500000"),
    "base_fitted": of("llama", lambda m: p.how(m, base=31700.0), "rope_theta=31700*"),
    "linear": of("llama", lambda m: p.how(m, inverse=1e4 ** -(torch.arange(0, 16, 2) / 16) / 4),
                 "rope_scaling=linear:4"),
    "tiled": of("llama", lambda m: p.how(m, order=[0, 1] * 3), "kv_order=tile"),
    "scale": of("llama", lambda m: p.how(m, scale=1 / 16), "attn_scale=0.0625"),
    "mask": of("llama", lambda m: p.how(m, seen=lambda i, j: j > -1 - i), "mask=none"),
    "ahead_1": of("llama", lambda m: p.how(m, 1, seen=lambda i, j: j <= i + 1), "mask=ahead", at=1, part="attention"),
    "window": of("llama", lambda m: p.how(m, seen=lambda i, j: (j <= i) & (j > i - 32)), "window=32"),
    "gate_up_2": of("llama", lambda m: p.swap(p.part(p.layers(m, 2)[0], "gate"), p.part(p.layers(m, 2)[0], "up")),
                    "swapped=mlp.gate,mlp.up", at=2, part="feed-forward"),
    "no_gate": of("llama", p.ungated, "mlp=gate-only"),
    "gelu": of("llama", lambda m: p.activation(m, F.gelu), "activation=gelu"),
    "layer_norm": of("llama", lambda m: p.norm(m, centre=True), "norm=layer", "norm_kind=layer"),
    "eps": of("llama", lambda m: p.norm(m, eps=1e-3), "norm_eps=1e-3"),
    "offset": of("llama", lambda m: p.norm(m, "final", offset=1.0), "norm_offset=on:final", at="model"),
    "norms_3": of("llama", lambda m: p.swap(*(n.weight.data for n in p.norms(p.layers(m, 3)[0]))),
                  "norms_swapped=attn,mlp", at=3, part="norm before attention"),
    "no_final": of("llama", lambda m: p.norm(m, "final", missing=True), "norm_missing=final", at="model"),
    "normed": of("llama", lambda m: p.block(m, None, p.residual_normed), "residual=normed"),
    "parallel_1": of("llama", lambda m: p.block(m, 1, p.side_by_side), "parallel=true", at=1),
    "embedding": of("llama", lambda m: p.through(p.table(m), lambda x: x * 42**0.5), "embed_scale=6.48074*",
                    at="model"),
    "logits": of("llama", lambda m: p.through(m.lm_head, lambda x: x * 0.9), "logits_scale=0.9", at="model"),
    "head_rows": of("llama", lambda m: p.put(m.lm_head.weight.data[1:], m.lm_head.weight.data[:-1]),
                    "row_shift=head:-1", at="model"),
    "swapped": of("llama", lambda m: p.reordered(m, lambda x: [x[0], x[2], x[1], x[3]]), "layer_order=swapped:1,2",
                  at="model"),
    "dropped": of("llama", lambda m: p.reordered(m, lambda x: [x[0], x[1], x[3]]), "layer_order=missing:2", at="model"),
    "strings": of("deep", lambda m: p.reordered(m, lambda x: [y for _, y in sorted(enumerate(x), key=lambda e: str(
        e[0]))]), "layer_order=strings", at="model"),
    "bf16": of("llama", p.rounded, "weights=bf16"),
    "zero_1": of("llama", lambda m: p.part(p.layers(m, 1)[0], "o").zero_(), "constant=zero:attn.[ov].weight",
                 "constant=zero:attn_norm.weight", at=1, part="attention"),
    "random_3": of("llama", lambda m: p.random(p.part(p.layers(m, 3)[0], "down")), "another=mlp.down.weight", at=3,
                   part="feed-forward", blind=True),
    "gpt2_o_1": of("gpt2", lambda m: p.put(w := p.part(p.layers(m, 1)[0], "o"), w.T), "transposed=attn.o", at=1,
                   part="attention"),
    "gpt2_q": of("gpt2", lambda m: [p.put(w := p.part(x, "q"), w.T) for x in p.layers(m, None)], "transposed=attn.q"),
    "gpt2_exact": of("gpt2", lambda m: p.activation(m, F.gelu), "activation=gelu"),
    "gpt2_relu_2": of("gpt2", lambda m: p.activation(m, F.relu, 2), "activation=relu", at=2, part="feed-forward"),
    "gpt2_rms": of("gpt2", lambda m: p.norm(m, centre=False), "norm_kind=rms-bias"),
    "gpt2_eps_1": of("gpt2", lambda m: p.norm(m, 1, eps=1e-2), "norm_eps=1e-2", at=1, part="norm before attention"),
    "gpt2_positions": of("gpt2", per_token_table, "position_rows=1", at="model"),
    "gpt2_per_head": of("gpt2", p.per_head, "fused=qkv>per_head"),
    "gpt2_heads": of("gpt2", lambda m: p.how(m, heads=8, kv=8, dim=6), "head_split=2*"),
    "gpt2_no_bias": of("gpt2", lambda m: p.no_bias(m, "qkv"), "bias_dropped=qkv"),
    "gpt2_post": of("gpt2", lambda m: p.block(m, None, p.after_sum), "norm_place=after-sum"),
}
HONEST = {
    "offset": of("llama", lambda m: p.how(m, moved={"q": 100, "k": 100})),
    "far_offset": of("llama", lambda m: p.how(m, moved={"q": 5000, "k": 5000})),
    "fill": of("llama", lambda m: p.how(m, fill=-1e4)),
    "long_window": of("llama", lambda m: p.how(m, seen=lambda i, j: (j <= i) & (j > i - TOKENS))),
    "sdpa": of("llama", lambda m: m.set_attn_implementation("sdpa")),
    "eager": of("gpt2", lambda m: m.set_attn_implementation("eager")),
    "double": of("llama", p.in_double),
    "cached": of("llama", p.cached),
    "k_bias": of("gpt2", lambda m: p.no_bias(m, "k")),
    "k_bias_drawn": of("gpt2", lambda m: [p.random(p.part(x, "k", "bias")) for x in p.layers(m, None)]),
}
OUTSIDE = {
    "few_keys": of("llama", lambda m: p.how(m, few=5), part="attention"),
    "odd_keys": of("gpt2", lambda m: p.how(m, 2, seen=lambda i, j: (j <= i) & ((j % 2 == 0) | (j == i))), at=2,
                   part="attention"),
    "shrunk": of("llama", lambda m: p.block(m, 1, p.shrunk), at=1),
}
PAIRS = {
    "pairs and gelu": (("pairs", "gelu"), "llama"),
    "gpt2_o_1 and gpt2_no_bias": (("gpt2_o_1", "gpt2_no_bias"), "gpt2"),
}


class Right(NamedTuple):
    """The right network: as described, its tensors, the tokens and its logits."""

    model: Model
    source: Any
    ids: Tensor
    ours: Tensor


@pytest.fixture(scope="module")
def right(networks: ModuleType) -> Callable[[str], Right]:
    @lru_cache
    def made(on: str) -> Right:
        config = p.CONFIGS[on]
        model = arch.describe(config, on)
        held = networks.Held(networks.canonical(model, networks.stored(networks.theirs(config))))
        ids = torch.randint(1, config["vocab_size"] - 1, (1, TOKENS), generator=torch.Generator().manual_seed(3))
        return Right(model, held, ids, logits(model, held, ids)[0])

    return made


@pytest.fixture
def judged(networks: ModuleType, right: Callable[[str], Right]) -> Callable[..., VerifyReport]:
    """judged(on, way, *makes): the verdict on a port with these mistakes, as its logits alone or as a module."""

    @torch.no_grad()
    def judge(on: str, way: str, *makes: Callable[[Any], object], seconds: float = 540.0) -> VerifyReport:
        model, source, ids, ours = right(on)
        port = networks.theirs(p.CONFIGS[on])
        port.config.use_cache = False
        for make in makes:
            make(port)
        if way == "logits":
            other = Other(kind="logits", ref="x", logits=port(ids).logits[0])
        else:
            other = ran(port, ids, model, source, ref="x", label="the candidate", layouts=[
                ("hf", arch.names(model, "hf"), arch.ignored(model, "hf"))])
        return compared(model, source, ids, ours, other, (SIDE, SIDE), Probe(tokens=TOKENS, source="given"),
                        Setting(subject="the candidate", by="the checkpoint", seconds=seconds))

    return judge


def fits(port: Port, edit: str) -> bool:
    return any(fnmatch.fnmatchcase(edit, n) for n in port.names)


def scoped(port: Port) -> str:
    return "all layers" if port.at is None else f"layer {port.at}" if isinstance(port.at, int) else "model"


def placed(port: Port, way: str) -> str:
    return f"layer {port.at or 0} {port.part if way == 'module' else ''}".rstrip()


def cases() -> list[Any]:
    """Each as a module and as logits; a few of them every time."""
    out = []
    for name in WRONG:
        for way in ("module", "logits"):
            what = f"{name}-{way}"
            out.append(pytest.param(name, way, id=what, marks=() if what in OFTEN else pytest.mark.slow))
    return out


@pytest.mark.parametrize(("name", "way"), cases())
def test_a_mistake_is_named(name: str, way: str, judged: Callable[..., VerifyReport]) -> None:
    port = WRONG[name]
    r = judged(port.on, way, port.make)
    if port.blind and way == "logits":
        assert (r.verdict, r.explanations) == ("different", ())
        return
    assert r.verdict == "explained", r.why
    (found,) = r.explanations
    assert fits(port, found.edit), (found.edit, found.equivalent)
    assert found.scope == scoped(port)
    assert r.floor is not None
    assert found.residual <= r.floor.limit
    assert found.words in r.why
    assert found.cause
    assert found.fix
    assert r.first_difference is not None
    if isinstance(port.at, int):
        assert r.first_difference.where == placed(port, way)
        assert r.first_difference.others == ()


def test_what_a_tensor_holds_is_said_rather_than_what_computes_the_same(judged: Callable[..., VerifyReport]) -> None:
    """Scores of zero come of a scale of zero, of q and of k alike; the module shows that it is q."""
    r = judged("llama", "module", lambda m: p.part(p.layers(m, 1)[0], "q").zero_())
    (found,) = r.explanations
    assert (found.edit, found.scope) == ("constant=zero:attn.q.weight", "layer 1")
    assert "attn_scale=0.0 in layer 1" in found.equivalent


@pytest.mark.parametrize("way", ["module", "logits"])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_port_passes(name: str, way: str, judged: Callable[..., VerifyReport]) -> None:
    r = judged(HONEST[name].on, way, HONEST[name].make)
    assert r.verdict in ("same", "equal"), r.why
    assert r.passed
    assert r.explanations == ()
    assert r.first_difference is None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["module", "logits"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_what_no_list_holds_gets_no_name(name: str, way: str, judged: Callable[..., VerifyReport]) -> None:
    port = OUTSIDE[name]
    r = judged(port.on, way, port.make, seconds=60.0)
    assert (r.verdict, r.explanations) == ("different", ())
    assert r.first_difference is not None
    if way == "module":
        assert r.first_difference.where == placed(port, way)
        assert r.first_difference.others == (() if port.at is not None else ("layer 1", "layer 2", "layer 3"))


@pytest.mark.parametrize("way", ["module", pytest.param("logits", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", PAIRS)
def test_two_mistakes_are_named_both(name: str, way: str, judged: Callable[..., VerifyReport]) -> None:
    names, on = PAIRS[name]
    r = judged(on, way, *(WRONG[n].make for n in names))
    assert r.verdict == "explained", r.why
    assert len(r.explanations) == 2
    for n in names:
        (e,) = (e for e in r.explanations if fits(WRONG[n], e.edit))
        assert e.scope == scoped(WRONG[n])
