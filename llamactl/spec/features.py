"""A Model told in words, feature by feature, and the difference of two as a list of edits.

`features` is what `compare` prints, `diff` what it calls the difference, `path` the edits that lead from one to the
other, each of which `edits.apply` can make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model
from llamactl.spec.parts import MLP, Attention, LearnedPositions, MoE, Norm, SinusoidalPositions
from llamactl.spec.rope import Rope

ACTIVATION = {
    "silu": "SiLU", "gelu": "GELU (exact)", "gelu_tanh": "GELU (tanh form)", "relu": "ReLU", "relu2": "squared ReLU",
    "quick_gelu": "quick GELU", "swigluoai": "clamped SiLU",
}
GATED = {"silu": "SwiGLU", "gelu": "GeGLU (exact)", "gelu_tanh": "GeGLU (tanh form)", "relu": "ReGLU",
         "swigluoai": "clamped SwiGLU"}


RARE = ("factors", "beside the decoder")  # most models have none: shown where one does


class Feature(NamedTuple):
    """One side of a model in words. name: what it is a feature of."""

    name: str
    text: str


class Change(NamedTuple):
    """One difference: the feature, and how it reads before and after."""

    name: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.name}: {self.before} -> {self.after}"


def features(model: Model) -> tuple[Feature, ...]:
    """Positions, norm, feed-forward, attention, biases, head, factors, dropout, the sizes, then what is no decoder."""
    return (
        Feature("positions", positions(model)),
        Feature("norm", norm(model)),
        Feature("feed-forward", feed_forward(model)),
        Feature("attention", attention(model)),
        Feature("biases", biases(model)),
        Feature("head", head(model)),
        Feature("factors", factors(model)),
        Feature("dropout", f"{model.dropout:g}" if model.dropout else "none"),
        Feature("layers", f"{model.n_layers:,}"),
        Feature("hidden", f"{model.hidden:,}"),
        Feature("vocabulary", f"{model.embed.vocab:,}"),
        Feature("context", f"{model.context.usable:,}" if model.context.usable else "no limit stated"),
        Feature("beside the decoder", ", ".join(s.name.replace("_", " ") for s in model.sections) or "nothing"),
    )


def shown(told: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """The features to show of these models beside each other, each with its text by name."""
    return tuple(n for n in told[0] if n not in RARE or {t[n] for t in told} - {"none", "nothing"})


def diff(a: Model, b: Model) -> tuple[Change, ...]:
    """The features of `b` that read otherwise than those of `a`, in reading order."""
    pairs = zip(features(a), features(b), strict=True)
    return tuple(Change(x.name, x.text, y.text) for x, y in pairs if x.text != y.text)


def _share(model: Model, say: Callable[[Layer], str | None]) -> str:
    """What each layer says: once if all say the same, else with how many do; silent layers are left out."""
    told: Counter[str] = Counter()
    for layer, n in model.distinct_layers():
        word = say(layer)
        if word:
            told[word] += n
    if len(told) == 1 and sum(told.values()) == model.n_layers:
        return next(iter(told))
    return "; ".join(f"{word} on {n} of {model.n_layers} layers" for word, n in told.items())


def _rope(rope: Rope, head_dim: int) -> str:
    out = f"RoPE, base {rope.theta:,.10g}"
    if rope.dim != head_dim:
        out += f", {rope.dim} of {head_dim} dimensions"
    if rope.scaling:
        factor = f" x{rope.scaling.factor:g}" if rope.scaling.factor else ""
        out += f", {rope.scaling.kind}{factor}"
    return out


def positions(model: Model) -> str:
    """How positions enter."""

    def one(layer: Layer) -> str | None:
        a = layer.attn
        if a is None:
            return None
        if isinstance(a, LatentAttention):
            return _rope(a.rope, a.qk_rope) if a.rope else None
        if a.rope:
            return _rope(a.rope, a.head_dim)
        return "ALiBi" if a.alibi else None

    told = _share(model, one)
    if isinstance(model.positions, LearnedPositions):
        table = f"learned table of {model.positions.rows:,}, added at the input"
        return f"{table}; {told}" if told else table
    if isinstance(model.positions, SinusoidalPositions):
        return "fixed sinusoids, added at the input"
    return told or "none"


def norm(model: Model) -> str:
    """Which norm, and where it stands."""

    def kind(n: Norm) -> str:
        if not n.weight:
            return "LayerNorm without parameters" if n.kind == "layer" else "RMSNorm without parameters"
        if n.kind == "layer":
            return "LayerNorm (scale and shift)" if n.bias else "LayerNorm (scale)"
        return "RMSNorm (1 + scale)" if n.offset else "RMSNorm (scale)"

    def one(layer: Layer) -> str | None:
        before, after = layer.attn_norm or layer.mlp_norm, layer.attn_post_norm or layer.mlp_post_norm
        if before is None and after is None:
            return None
        if before and after:
            where = "before and after each branch"
        elif before:
            where = "before each branch" if not layer.parallel else (
                "once, before both branches" if layer.mlp_norm is None else "before each of two branches side by side")
        else:
            where = "after each sum" if layer.post_residual else "after each branch"
        some = before or after
        assert some is not None
        return f"{kind(some)} {where}"

    return _share(model, one) or "none"


def _mlp(m: MLP, hidden: int) -> str:
    ratio = m.ffn / hidden
    times = f" = {ratio:.4g} x hidden" if len(f"{ratio:.4g}") <= 5 else ""
    name = GATED.get(m.activation, m.activation) if m.gated else ACTIVATION.get(m.activation, m.activation)
    return f"{3 if m.gated else 2} matrices, {name}, {m.ffn:,}{times}"


def feed_forward(model: Model) -> str:
    """Matrices, activation and width; experts where there are some."""

    def one(layer: Layer) -> str | None:
        ff = layer.mlp
        if ff is None:
            return None
        if isinstance(ff, MoE):
            shared = f" and a shared one of {ff.shared.ffn:,}" if ff.shared else ""
            return f"{ff.top_k} of {ff.n_experts} experts{shared}: {_mlp(ff.expert, model.hidden)}"
        return _mlp(ff, model.hidden)

    return _share(model, one) or "none"


def other_scale(a: Attention | LatentAttention) -> float | None:
    """The factor on q.k where it is not the usual one, up to what no arithmetic could tell apart; else None."""
    return None if a.scale is None or abs(a.scale / a.usual_scale - 1) < 1e-12 else a.scale


def _scaled(a: Attention | LatentAttention) -> str | None:
    scale = other_scale(a)
    return None if scale is None else f"scores x {scale:.6g}"


def _growth(a: Attention) -> str | None:
    if a.q_growth is None:
        return None
    beta, positions, first = a.q_growth
    return f"q x 1 + {beta:g} ln(1 + floor((m + {first}) / {positions:,})) at position m".replace("(m + 0)", "m")


def _sparse(a: Attention) -> str | None:
    if a.sparse is None:
        return None
    return f"block-sparse (the last {a.sparse.local} blocks of {a.sparse.block}, then each {a.sparse.stride}th)"


def _heads(a: Attention) -> str:
    if a.n_kv_heads == a.n_heads:
        out = f"MHA, {a.n_heads} heads of {a.head_dim}"
    elif a.n_kv_heads == 1:
        out = f"MQA, {a.n_heads} query heads share 1 KV head of {a.head_dim}"
    else:
        out = f"GQA, {a.n_heads} query heads share {a.n_kv_heads} KV heads of {a.head_dim}"
    extras = [("norms on q and k", a.q_norm), ("sinks", a.sinks), ("an output gate", a.gated),
              (f"logits capped at {a.softcap or 0:g}", a.softcap), ("V taken from K", a.v_from_k),
              (_scaled(a), other_scale(a)), (_sparse(a), a.sparse),
              (f"q, k and v clipped at {a.clip or 0:g}", a.clip), ("K and V of pictures", a.cross),
              ("K and V of an earlier layer", a.shares_kv), ("a norm on v", a.v_norm),
              ("norms after the rotation", a.norm_after_rope), (_growth(a), a.q_growth)]
    if a.window:
        out += f", {a.window_kind} window {a.window:,}"
    return out + "".join(f", {word}" for word, there in extras if there)


def attention(model: Model) -> str:
    """Heads, sharing, windows; other mixers by name."""

    def one(layer: Layer) -> str | None:
        words = []
        if isinstance(layer.attn, LatentAttention):
            latent = f"{layer.attn.kv_rank} + {layer.attn.qk_rope}"
            words.append(f"MLA, {layer.attn.n_heads} heads over a latent of {latent}" + _latent_extras(layer.attn))
        elif layer.attn is not None:
            words.append(_heads(layer.attn))
        if layer.state is not None:
            words.append(type(layer.state).__name__)
        return " beside ".join(words) or None

    return _share(model, one) or "none"


def _latent_extras(a: LatentAttention) -> str:
    scale, x = _scaled(a), a.indexer
    out = f", {scale}" if scale else ""
    if x is not None:
        out += f", an indexer of {x.heads} heads of {x.head_dim}" + (f" that picks {x.top_k:,}" if x.top_k else "")
    return out


def head(model: Model) -> str:
    """Where the logits come from, and what is done to them."""
    h = model.head
    extras = [("rows of length 1", h.unit_rows), (f"logits x {h.scale or 1:.6g}", h.scale not in (None, 1)),
              (f"logits capped at {h.softcap or 0:g}", h.softcap)]
    return ("tied to the embedding" if h.tied else "untied") + "".join(f", {word}" for word, there in extras if there)


def factors(model: Model) -> str:
    """What the embedding and the branches are multiplied by before they are added to the stream."""

    def by(what: str, factor: float | None) -> str | None:
        return None if factor is None or factor == 1 else f"{what} x {factor:.6g}"

    told = (by("embedding", model.embed.scale), _share(model, lambda x: by("branches", x.residual_scale)))
    return "; ".join(filter(None, told)) or "none"


def biases(model: Model) -> str:
    """Which matrices have a bias vector."""

    def one(layer: Layer) -> str | None:
        there = list(_biased(layer))
        every = {"q, k, v", "o", "feed-forward"}
        return "on every matrix" if every <= set(there) else ", ".join(there) or None

    told = _share(model, one)
    if model.head.bias:
        told = f"{told}; head" if told else "head"
    return told or "none"


def _biased(layer: Layer) -> Iterable[str]:
    a, ff = layer.attn, layer.mlp
    if isinstance(a, Attention):
        yield from ("q, k, v",) if a.qkv_bias else ()
        yield from ("o",) if a.o_bias else ()
    if isinstance(a, LatentAttention) and a.bias:
        yield "latent projections"
    if isinstance(ff, MLP) and ff.bias:
        yield "feed-forward"
    if isinstance(ff, MoE):
        yield from ("feed-forward",) if ff.expert.bias else ()
        yield from ("router",) if ff.router_bias else ()
