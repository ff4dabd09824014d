"""The values of edits that are worth trying on a model: those that ports are known to get wrong, and near ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations

from llamactl.spec.config import ACTIVATIONS
from llamactl.spec.misread import LINEAR, attention, gated, shapes
from llamactl.spec.model import Model
from llamactl.spec.parts import LearnedPositions

THETAS = (1e4, 5e4, 1e5, 1.5e5, 1.6e5, 2.5e5, 5e5, 1e6, 5e6, 1e7, 1e3, 100.0)
EPSES = ("1e-2", "1e-3", "1e-4", "1e-5", "1e-6", "1e-7", "1e-8", "1e-12", "0")


def always(*values: str) -> Callable[[Model], Iterable[str]]:
    """The same values for every model."""
    return lambda m: values


def thetas(m: Model) -> list[str]:
    """RoPE bases."""
    a = attention(m)
    if a is None or a.rope is None:
        return []
    own = a.rope.theta
    near = [own * x for x in (0.1, 0.5, 2.0, 10.0)]
    return [f"{t:.10g}" for t in dict.fromkeys([*THETAS, *near]) if t != own and t > 1]


def scalings(m: Model) -> list[str]:
    """RoPE scalings: none, other factors and lengths of the model's own, and other kinds."""
    a = attention(m)
    if a is None or a.rope is None:
        return []
    s, out = a.rope.scaling, []
    if s is not None:
        out.append("none")
        out += [f"{s.kind}:{x}" for x in (2, 4, 8, 16, 32, 40) if s.kind != "longrope" and x != s.factor]
        out += [f"{s.kind}:{s.factor}:{x}" for x in (2048, 4096, 8192, 32768) if s.original and x != s.original]
    out += [f"linear:{x}" for x in (2, 4, 8, 16, 0.5, 0.25)]
    if s is None or s.kind != "llama3":
        out += [f"llama3:{x}:8192" for x in (8, 32)] + ["llama3:8", "llama3:32"]
    if s is None or s.kind != "yarn":
        out += [f"yarn:{x}" for x in (2, 4, 8, 16, 40)]
    return out


def bands(m: Model) -> list[str]:
    """Bands of llama3 and yarn, swapped and usual ones."""
    a = attention(m)
    s = a.rope.scaling if a and a.rope else None
    if s is None or s.kind not in ("llama3", "yarn"):
        return []
    if s.kind == "llama3":
        low, high = s.low_freq_factor or 1.0, s.high_freq_factor or 4.0
        return [f"{high}:{low}", "1:4", "1:8", "1:2", "2:4", "0.5:4"]
    fast, slow = s.beta_fast or 32.0, s.beta_slow or 1.0
    return [f"{slow}:{fast}", "32:1", "64:1", "16:1", "32:2", f"{fast}:{slow}:no-attention"]


def widths(m: Model) -> list[str]:
    """Dimensions that rotate."""
    a = attention(m)
    if a is None or a.rope is None:
        return []
    d, out = a.head_dim, []
    for n in sorted({d // 4, d // 2, 3 * d // 4, d, a.rope.dim // 2, min(d, 2 * a.rope.dim)}):
        if n >= 2 and n % 2 == 0:
            out += [str(n)] * (n != a.rope.dim) + [f"{n}/{d}"] * (n != d)
    return out


def rows(m: Model) -> list[str]:
    """Orders of q's and k's rows, with right and wrong head counts."""
    a = attention(m)
    if a is None:
        return []
    counts = {"q": ["", f":{a.n_kv_heads}"], "k": ["", f":{a.n_heads}"], "both": ["", f":{a.n_heads}"]}
    orders = ("adjacent>half", "half>adjacent")
    return [f"{side}:{order}{n}" for side, own in counts.items() for order in orders for n in own]


def scales(m: Model) -> list[str]:
    """Factors on q.k."""
    a = attention(m)
    if a is None:
        return []
    d, own = a.head_dim, a.scale if a.scale is not None else a.usual_scale
    made = [m.hidden**-0.5, 1 / d, 1.0, d**-0.5, (2 * d) ** -0.5, (d / 2) ** -0.5, 1 / m.hidden, d**-0.25,
            (a.n_heads * d) ** -0.5, (a.n_kv_heads * d) ** -0.5, a.n_heads**-0.5, (m.hidden / a.n_kv_heads) ** -0.5,
            d**0.5, 0.125, 2 * own, own / 2, -own, 0.0]
    return [repr(x) for x in dict.fromkeys(made) if abs(x - own) > 1e-9 * abs(own)]


def windows(m: Model) -> list[str]:
    """Sliding windows."""
    own = {x.attn.window for x in m.layers if attention(m) and x.attn is not None and hasattr(x.attn, "window")}
    out = ["none"] * bool(own - {None})
    for w in own - {None}:
        assert w is not None
        out += [str(w - 1), str(w + 1), str(w // 2), str(2 * w)]
    return [*out, *(str(2**n) for n in range(2, 13)), "100", "200", "500", "1000"]


def places(m: Model) -> list[str]:
    """Words for the norms that a model has."""
    first, a = m.layers[0], attention(m)
    have = {"attn": first.attn_norm, "mlp": first.mlp_norm, "attn_post": first.attn_post_norm,
            "mlp_post": first.mlp_post_norm, "final": m.norm, "embed": m.embed_norm,
            "q": a.q_norm if a else None, "k": a.k_norm if a else None}
    return [k for k, v in have.items() if v is not None]


def kinds(m: Model) -> list[str]:
    """Kinds of norms, everywhere or by place."""
    kinds = ("layer", "rms", "rms-outside", "rms-sum", "rms-l2", "layer-unbiased", "layer-outside", "layer-centred",
             "rms-twice", "layer-twice", "rms-half", "rms-bias")
    return [*kinds, "layer:layers", "rms:layers", "rms-twice:layers", "layer-twice:layers",
            *(f"{k}:{p}" for k in (*kinds[:2], "rms-twice", "layer-twice", "rms-bias")
              for p in places(m))]


def by_place(*values: str) -> Callable[[Model], Iterable[str]]:
    """Values for all norms, for those of layers, and for each place."""
    return lambda m: [*values, *(f"{v}:{p}" for v in values for p in ("layers", *places(m)))]


def norm_pairs(m: Model) -> list[str]:
    """Norms of a layer that can be swapped."""
    have = places(m)
    return [f"{a},{b}" for n, a in enumerate(have) for b in have[n + 1:] if not {a, b} & {"final", "embed"}]


def pairs(m: Model) -> list[str]:
    """Linear maps of one shape."""
    found = shapes(m)
    return [f"{a},{b}" for n, a in enumerate(LINEAR) for b in LINEAR[n + 1:]
            if found.get(f"{a}.weight") is not None and found.get(f"{a}.weight") == found.get(f"{b}.weight")]


def copies(m: Model) -> list[str]:
    """One linear map for another of its shape."""
    return [x for pair in pairs(m) for a, b in [pair.split(",")] for x in (f"{a}<{b}", f"{b}<{a}")]


def fusions(m: Model) -> list[str]:
    """Orders of fused parts."""
    out = []
    if attention(m):
        out += [f"qkv>{''.join(p)}" for p in permutations("qkv")][1:]
        out += ["qkv>per_head", "per_head>qkv", "qkv>per_lane", "per_lane>qkv"]
    return out + (["gu>interleaved", "interleaved>gu"] if gated(m) else [])


def constants(m: Model) -> list[str]:
    """Tensors of zeros, norms of ones."""
    found = sorted(shapes(m), key=lambda n: "norm" in n)  # a matrix before a norm that has the same effect
    return [f"zero:{n}" for n in found] + [f"ones:{n}" for n in found if "norm" in n and n.endswith("weight")]


def scaled(m: Model) -> list[str]:
    """Matrices negated, halved, doubled."""
    return [f"{n}.weight*{x}" for n in LINEAR if f"{n}.weight" in shapes(m) for x in (-1, 0.5, 2)]


def orders(m: Model) -> list[str]:
    """Orders of layers."""
    n = range(m.n_layers)
    return ["strings", "reversed", "first", *(f"{k}:{i}" for k in ("shifted", "clamped") for i in (1, -1)),
            *(f"missing:{i}" for i in n), *(f"repeated:{i}" for i in n), *(f"twice:{i}" for i in n[:-1]),
            *(f"swapped:{i},{j}" for gap in range(1, m.n_layers) for i in n for j in (i + gap,) if j < m.n_layers)]


def roundings(m: Model) -> list[str]:
    """Narrower types, of all tensors, of the matrices, of one place."""
    kinds = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "fp8_e4m3_scaled")
    return [*kinds, *(f"{k}:{p}.weight" for k in kinds for p in (*LINEAR, "embed") if f"{p}.weight" in shapes(m)),
            *(f"{k}:linear" for k in kinds)]


def embed_scales(m: Model) -> list[str]:
    """Factors on the embedding."""
    own = m.embed.scale
    made = [m.hidden**0.5, m.hidden**-0.5, 0.5, 2.0, *([own**2] if own else [])]
    return ["none"] * (own is not None) + [repr(x) for x in made if x != own]


def logit_scales(m: Model) -> list[str]:
    """Factors on the logits."""
    own = m.head.scale
    made = [m.hidden**-0.5, m.hidden**0.5, 1 / m.hidden, 0.5, 2.0, 0.9, 1.1, 0.1, 10.0, 0.7, 0.8, 1.2, -1.0]
    return ["none"] * (own is not None) + [repr(x) for x in made if x != own]


def caps(own: Callable[[Model], float | None]) -> Callable[[Model], Iterable[str]]:
    """Soft caps other than the model's own."""
    return lambda m: ["none"] * (own(m) is not None) + [repr(x) for x in (20.0, 30.0, 50.0, 10.0, 15.0, 100.0)
                                                         if x != own(m)]


def activations(m: Model) -> list[str]:
    """Activations."""
    return list(dict.fromkeys(ACTIVATIONS.values()))


def positions(m: Model) -> list[str]:
    """Positions taken away, where there are any."""
    return ["none"] if isinstance(m.positions, LearnedPositions) or (attention(m) and attention(m).rope) else []  # type: ignore[union-attr]
