"""content.py for the blocks of Gemma 4 and Gemma 3n, which hold more than attention and one feed-forward.

Gemma 4's block is computed again part by part. Gemma 3n's keeps four streams that predict and correct each other; there
every matrix and norm is put into the module that transformers runs at that point, in its order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MoE, Norm

Claim = tuple[str, Tensor, Tensor]


def is_gemma(layer: nn.Module) -> bool:
    return type(layer).__name__ in ("Gemma4TextDecoderLayer", "Gemma3nTextDecoderLayer")


@contextmanager
def watch(lib: Any, layer: nn.Module, s: dict[str, Any]) -> Iterator[None]:
    """What the layer gets beside the stream, its router and experts, and every call inside Gemma 3n's."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = 2 if hasattr(layer, "altup") else 1
        given = args[at] if len(args) > at else kwargs.get("per_layer_input")
        s["per_layer"] = None if given is None else given.flatten(0, -2)

    def routed(_: nn.Module, args: tuple[Any, ...], out: tuple[Tensor, ...]) -> None:
        s["router_in"], s["router"], s["weights"], s["chosen"] = (x.clone() for x in (args[0], *out))

    with ExitStack() as stack:
        handles = [layer.register_forward_pre_hook(before, with_kwargs=True)]
        if hasattr(layer, "experts"):
            handles.append(layer.router.register_forward_hook(routed))
            stack.enter_context(lib.hooked(layer.experts, s, "experts_in", "experts_out"))
        if hasattr(layer, "altup"):
            stack.enter_context(lib.called(layer, s.setdefault("calls", [])))
        yield
        for handle in handles:
            handle.remove()


def watch_streams(lib: Any, lm: nn.Module, s: dict[str, Any], stack: ExitStack) -> None:
    """Gemma 3n: how the streams are made and brought together, before and after all blocks."""
    for text in [m for m in lm.modules() if hasattr(m, "altup_projections")]:
        s["project"], s["unproject"] = [], []
        stack.enter_context(lib.called(text.altup_projections, s["project"]))
        stack.enter_context(lib.called(text.altup_unembed_projections, s["unproject"]))
        stack.enter_context(lib.hooked(text.norm, s, "merged", "_"))


def watch_experts(layer: nn.Module, s: dict[str, Any]) -> None:
    """Each expert's output for every token."""
    if hasattr(layer, "experts"):
        x, one = s["experts_in"], torch.ones(len(s["experts_in"]), 1)
        with torch.no_grad():
            s["experts"] = [layer.experts(x, torch.full((len(x), 1), e), one)
                            for e in range(layer.experts.down_proj.shape[0])]


def moe_claims(lib: Any, moe: MoE, at: str, t: Any, s: dict[str, Any], stream: Tensor) -> Iterator[Claim]:
    """Router and experts read the stream, the dense MLP its own norm of it; each has a norm behind it."""
    x = lib.normed(Norm(dim=moe.hidden, eps=1e-6, weight=False), t, "", stream) * t[f"{at}.router.scale"]
    yield "router", torch.softmax(lib.linear(t, f"{at}.router", x * moe.hidden**-0.5), -1), s["router"]
    share = s["router"].gather(-1, s["chosen"])
    yield "expert_scale", share / share.sum(-1, keepdim=True) * t[f"{at}.router.expert_scale"][s["chosen"]], \
        s["weights"]
    norm = Norm(dim=moe.hidden, eps=1e-6)
    yield "experts_norm", lib.normed(norm, t, f"{at}.experts_norm", stream), s["experts_in"]
    for e in range(moe.n_experts):
        yield f"experts.{e}", lib.feed_forward(moe.expert, f"{at}.experts.{e}", t, s["experts_in"]), s["experts"][e]
    yield "shared", lib.feed_forward(moe.shared, f"{at}.shared", t, s["mlp_in"]), s["mlp_out"]


def mixed(lib: Any, layer: Layer, at: str, t: Any, s: dict[str, Any]) -> Tensor:
    """What the feed-forward branch hands to its last norm."""
    if not isinstance(layer.mlp, MoE):
        out: Tensor = s["mlp_out"]
        return out
    norm = Norm(dim=layer.mlp.hidden, eps=1e-6)
    both: Tensor = lib.normed(norm, t, f"{at}.mlp.shared_norm", s["mlp_out"]) + lib.normed(
        norm, t, f"{at}.mlp.experts_post_norm", s["experts_out"])
    return both


def tail(lib: Any, layer: Layer, at: str, t: Any, s: dict[str, Any], x: Tensor) -> Tensor:
    """The layer's own embedding of each token, then the scale of the whole layer."""
    if any(leaf.path == "per_layer.gate.weight" for leaf in layer.extra):
        gate = F.gelu(lib.linear(t, f"{at}.per_layer.gate", x), approximate="tanh")
        added = lib.linear(t, f"{at}.per_layer.up", gate * s["per_layer"])
        x = x + lib.normed(Norm(dim=x.shape[-1], eps=1e-6), t, f"{at}.per_layer.norm", added)
    return x * t[f"{at}.scalar"]


def per_layer_claims(lib: Any, model: Model, t: Any, seen: Any, x: Tensor) -> Iterator[Claim]:
    """Where each layer's own embedding comes from: a second table, and a projection of the first embedding `x`."""
    if "per_layer.embed.weight" not in t:
        return
    width = t["per_layer.norm.weight"].shape[0]
    table = (t["per_layer.embed.weight"][seen["embed"]["ids"]] * width**0.5).unflatten(-1, (-1, width))
    made = (lib.linear(t, "per_layer.projection", x) * model.hidden**-0.5).unflatten(-1, (-1, width))
    both = (lib.normed(Norm(dim=width, eps=1e-6), t, "per_layer.norm", made) + table) * 2**-0.5
    for i in range(model.n_layers):
        yield f"per_layer.{i}", both[:, i], seen[f"layers.{i}"]["per_layer"]
    for name in ("project", "unproject"):
        calls = seen["embed"].get(name, ())
        yield from lib.called_claims([f"altup.{name}.{n}.weight" for n in range(len(calls))], t, calls)


ALTUP = ("altup.norm", "altup.router")
ATTENTION = ("attn.q", "attn.q_norm", "attn.k", "attn.k_norm", "attn.v", "attn.o")


def altup_claims(lib: Any, layer: Layer, at: str, t: Any, s: dict[str, Any]) -> Iterator[Claim]:
    """Gemma 3n: every module of the block in the order of its calls; AltUp's router runs twice."""
    shared = layer.attn is not None and not layer.caches()
    order = (*ALTUP, "altup.predict", "attn_norm", "laurel.left", "laurel.right", "laurel.norm",
             *(x for x in ATTENTION if not (shared and x in ("attn.k", "attn.k_norm", "attn.v"))), "attn_post_norm",
             "mlp_norm", "mlp.gate", "mlp.up", "mlp.down", "mlp_post_norm", *ALTUP, "altup.correct",
             "per_layer.gate", "per_layer.up", "per_layer.norm")
    leaves = [leaf.path for leaf in layer.leaves()]
    assert {x.rpartition(".")[0] for x in leaves} == {*order, "altup.output"}
    scaled = s["calls"][-3][1][0].flatten(0, -2)  # the active stream, which later steps leave as it is
    yield "altup.output", s["out"][:len(scaled)] * t[f"{at}.altup.output.scale"], scaled
    for path, call in zip(order, s["calls"], strict=True):
        own = [f"{at}.{x}" for x in leaves if x.rpartition(".")[0] == path]
        yield from lib.called_claims(own, t, [call])
