"""Wrong ports of small models: transformers' own networks with one mistake each, written apart from llamactl."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# All dimensions differ, a head is not hidden / heads, and nothing of the Llama is square.
LLAMA = {"model_type": "llama", "vocab_size": 97, "hidden_size": 42, "intermediate_size": 56, "num_hidden_layers": 4,
         "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
         "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
         "dtype": "float32"}
DEEP = {**LLAMA, "num_hidden_layers": 12, "hidden_size": 24, "intermediate_size": 28, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 10}
GPT2 = {"model_type": "gpt2", "vocab_size": 101, "n_positions": 128, "n_embd": 48, "n_layer": 4, "n_head": 4,
        "n_inner": 80, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "dtype": "float32"}
CONFIGS: dict[str, dict[str, Any]] = {"llama": LLAMA, "deep": DEEP, "gpt2": GPT2}


def layers(m: Any, at: int | None) -> list[Any]:
    """One layer, or all."""
    found = list(m.model.layers if hasattr(m, "model") else m.transformer.h)
    return found if at is None else [found[at]]


def norms(layer: Any) -> tuple[Any, Any]:
    return (layer.ln_1, layer.ln_2) if hasattr(layer, "ln_1") else (layer.input_layernorm,
                                                                    layer.post_attention_layernorm)


def final(m: Any) -> Any:
    return m.model.norm if hasattr(m, "model") else m.transformer.ln_f


def table(m: Any) -> Any:
    return m.model.embed_tokens if hasattr(m, "model") else m.transformer.wte


def part(layer: Any, name: str, leaf: str = "weight") -> Tensor:
    """A view of a weight (out, in), or of a bias."""
    if not hasattr(layer, "ln_1"):
        return getattr(getattr(layer.self_attn if name in "qkvo" else layer.mlp, f"{name}_proj"), leaf).data  # type: ignore[no-any-return]
    if name in "qkv":
        whole = getattr(layer.attn.c_attn, leaf).data
        return whole.T.chunk(3)["qkv".index(name)] if leaf == "weight" else whole.chunk(3)["qkv".index(name)]  # type: ignore[no-any-return]
    held = {"o": layer.attn.c_proj, "up": layer.mlp.c_fc, "down": layer.mlp.c_proj}[name]
    out = getattr(held, leaf).data
    return out.T if leaf == "weight" else out  # type: ignore[no-any-return]


# ---- attention by hand

def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


@dataclass(kw_only=True)
class How:
    """What one layer's attention computes. turned: the sides that rotate; pairs: those of them by neighbours."""

    heads: int
    kv: int
    dim: int
    order: list[int]
    scale: float
    base: float | None = None
    inverse: Tensor | None = None
    turned: str = "qk"
    pairs: str = ""
    sign: float = 1.0
    moved: dict[str, int] = field(default_factory=dict)
    seen: Callable[[Tensor, Tensor], Tensor] = causal
    fill: float = float("-inf")
    few: int = 0


def how(m: Any, at: int | None = None, **changes: Any) -> None:
    """Attention of these layers by hand, with something changed."""
    c = m.config
    for layer in layers(m, at):
        if hasattr(m, "model"):
            own = How(heads=c.num_attention_heads, kv=c.num_key_value_heads, dim=c.head_dim, base=1e4, scale=0.0,
                      order=[])
            attn = layer.self_attn
        else:
            own = How(heads=c.n_head, kv=c.n_head, dim=c.n_embd // c.n_head, scale=0.0, order=[])
            attn = layer.attn
        for key, value in changes.items():
            setattr(own, key, value)
        own.scale = changes.get("scale", own.dim**-0.5)
        own.order = changes.get("order", [h * own.kv // own.heads for h in range(own.heads)])
        attn.how = own
        attn.forward = types.MethodType(attend, attn)


def attend(self: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    x, way = hidden_states, self.how
    n = x.shape[1]
    sides = self.c_attn(x).chunk(3, -1) if hasattr(self, "c_attn") else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
    q, k, v = (s.view(1, n, -1, way.dim).transpose(1, 2) for s in sides)
    at = torch.arange(n)
    if way.base is not None:
        inverse = way.base ** -(torch.arange(0, way.dim, 2) / way.dim) if way.inverse is None else way.inverse
        q, k, v = (turn(s, (at + way.moved.get(x, 0))[:, None] * inverse, x in way.pairs, way.sign)
                   if x in way.turned else s for x, s in zip("qkv", (q, k, v), strict=True))
    scores = q @ k[:, way.order].transpose(-1, -2) * way.scale
    scores = scores.masked_fill(~way.seen(at[:, None], at[None]), way.fill)
    if way.few:
        scores = scores.masked_fill(scores < scores.topk(min(way.few, n), -1).values[..., -1:], float("-inf"))
    y = (scores.softmax(-1) @ v[:, way.order]).transpose(1, 2).flatten(2)
    return (self.c_proj if hasattr(self, "c_proj") else self.o_proj)(y), None


def turn(x: Tensor, angle: Tensor, neighbours: bool, sign: float) -> Tensor:
    c, s = angle.cos(), angle.sin() * sign
    a, b = (x[..., ::2], x[..., 1::2]) if neighbours else x.chunk(2, -1)
    one, two = a * c - b * s, b * c + a * s
    return torch.stack((one, two), -1).flatten(-2) if neighbours else torch.cat((one, two), -1)


# ---- norms, branches, ends

def norm(m: Any, at: int | str | None = None, which: str = "12", **changes: Any) -> None:
    """Norms of layers (and the final one, of all), or the final one alone, by hand, with something changed."""
    found = [norms(x)[int(w) - 1] for x in layers(m, at) for w in which] if not isinstance(at, str) else []
    for n in [*found, *([final(m)] if at in (None, "final") else [])]:
        n.how = {"centre": hasattr(n, "bias"), "eps": 1e-5, "offset": 0.0, "missing": False, **changes}
        n.forward = types.MethodType(normed, n)


def normed(self: Any, x: Tensor) -> Tensor:
    way = self.how
    if way["missing"]:
        return x
    y = x - x.mean(-1, keepdim=True) if way["centre"] else x
    y = y / (y.square().mean(-1, keepdim=True) + way["eps"]).sqrt() * (self.weight + way["offset"])
    return y + self.bias if hasattr(self, "bias") else y


def block(m: Any, at: int | None, forward: Callable[..., Tensor]) -> None:
    """forward(x, attention, feed-forward, norm, norm) in place of the layer's own."""
    for layer in layers(m, at):
        def run(self: Any, hidden_states: Tensor, *args: Any, **kw: Any) -> Tensor:
            attn = self.self_attn if hasattr(self, "self_attn") else self.attn
            given = {k: v for k, v in kw.items() if k in ("attention_mask", "position_embeddings")}
            given.update(("attention_mask", a) for a in args if isinstance(a, Tensor))  # GPT-2 is given it by place
            return forward(hidden_states, lambda x: attn(hidden_states=x, **given)[0], self.mlp, *norms(self))

        layer.forward = types.MethodType(run, layer)


def residual_normed(x: Tensor, attn: Any, mlp: Any, one: Any, two: Any) -> Tensor:
    x = one(x)
    x = two(x + attn(x))
    return x + mlp(x)  # type: ignore[no-any-return]


def side_by_side(x: Tensor, attn: Any, mlp: Any, one: Any, two: Any) -> Tensor:
    return x + attn(one(x)) + mlp(two(x))  # type: ignore[no-any-return]


def after_sum(x: Tensor, attn: Any, mlp: Any, one: Any, two: Any) -> Tensor:
    x = one(x + attn(x))
    return two(x + mlp(x))  # type: ignore[no-any-return]


def shrunk(x: Tensor, attn: Any, mlp: Any, one: Any, two: Any) -> Tensor:
    """Nothing that anybody writes."""
    x = x + attn(one(x))
    return 0.9 * x + 0.8 * mlp(two(x)) + 0.1  # type: ignore[no-any-return]


class Function(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


def activation(m: Any, f: Callable[[Tensor], Tensor], at: int | None = None) -> None:
    for layer in layers(m, at):
        setattr(layer.mlp, "act_fn" if hasattr(layer.mlp, "act_fn") else "act", Function(f))


def ungated(m: Any) -> None:
    for layer in layers(m, None):
        layer.mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x))), layer.mlp)


def through(module: Any, change: Callable[[Tensor], Tensor]) -> None:
    """What a module gives, changed."""
    before = module.forward
    module.forward = lambda *a: change(before(*a))


def swap(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def put(w: Tensor, new: Tensor) -> None:
    w.copy_(new.clone())


def reordered(m: Any, order: Callable[[list[Any]], list[Any]]) -> None:
    found = nn.ModuleList(order(layers(m, None)))
    if hasattr(m, "model"):
        m.model.layers = found
    else:
        m.transformer.h = found
    m.config.num_hidden_layers = len(found)


def rounded(m: Any) -> None:
    for p in m.parameters():
        put(p.data, p.data.bfloat16().float())


def per_head(m: Any) -> None:
    """[q|k|v] read as if every head's q, k and v stood together."""
    for layer in layers(m, None):
        for w in (layer.attn.c_attn.weight.data.T, layer.attn.c_attn.bias.data):
            heads = w.clone().view(m.config.n_head, 3, -1, *w.shape[1:])
            put(w, heads.transpose(0, 1).reshape(w.shape))


def no_bias(m: Any, names: str) -> None:
    for layer in layers(m, None):
        for n in names:
            part(layer, n, "bias").zero_()


def random(w: Tensor) -> None:
    put(w, torch.randn(w.shape, generator=torch.Generator().manual_seed(5)) * w.std())


def run_whole(m: Any, change: Callable[[Callable[..., Any], Tensor], Any]) -> None:
    """The same network run in another way."""
    before = m.forward
    m.forward = lambda ids=None, **kw: change(before, kw.get("input_ids", ids))


def cached(m: Any) -> None:
    from transformers import DynamicCache

    def pieces(run: Callable[..., Any], ids: Tensor) -> Any:
        word = "cache" if "cache" in inspect.signature(type(m).forward).parameters else "past_key_values"
        past = {word: DynamicCache(config=m.config)}
        found = [run(ids[:, a:b], **past, use_cache=True) for a, b in ((0, 40), (40, 41), (41, None))]
        found[0].logits = torch.cat([f.logits for f in found], 1)
        return found[0]

    run_whole(m, pieces)


def in_double(m: Any) -> None:
    m.double()

    def run(before: Callable[..., Any], ids: Tensor) -> Any:
        out = before(ids)
        out.logits = out.logits.float()
        return out

    run_whole(m, run)
