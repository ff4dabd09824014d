"""The parts a decoder is made of: frozen values that know their own tensors.

A part answers `leaves()`: its tensors under canonical names, each with a role (the component it is counted under).
Everything else, totals, names in a checkpoint, cache sizes, is derived from the parts. Linear weights are (out, in).

    Attention      MLP | MoE      Norm      Embedding | LearnedPositions      Head

Rarer mixers stand in latent.py (MLA) and state.py (Mamba and its kin).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Union

from llamactl.spec.rope import Rope
from llamactl.spec.routing import Routing

if TYPE_CHECKING:
    from llamactl.spec.latent import LatentAttention


class Leaf(NamedTuple):
    """One tensor, or `copies` equal ones whose path holds `{e}` (an expert, a head) or `{i}` (a tower's layer).

    role: dotted component, e.g. "attention.q". kind: "param", or "buffer" for what is stored but not trained.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    kind: str = "param"
    copies: int = 1

    @property
    def elements(self) -> int:
        return prod(self.shape) * self.copies


Leaves = tuple[Leaf, ...]


def under(prefix: str, leaves: Leaves, *, role: str | None = None, copies: int = 1) -> Iterator[Leaf]:
    """`leaves` with `prefix.` before their paths, optionally all counted as `role` and repeated."""
    for leaf in leaves:
        yield Leaf(f"{prefix}.{leaf.path}", leaf.shape, role or leaf.role, leaf.kind, leaf.copies * copies)


def linear(path: str, out: int, in_: int, role: str, bias: bool = False) -> Iterator[Leaf]:
    """A Linear: weight (out, in) and an optional bias (out)."""
    yield Leaf(f"{path}.weight", (out, in_), role)
    if bias:
        yield Leaf(f"{path}.bias", (out,), role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """RMSNorm x / sqrt(mean(x^2) + eps) * g (d parameters) or LayerNorm (2d, or d without bias).

    offset: the weight is stored as g - 1 (Gemma). heads: one such norm for each head, or None.
    weight=False: a norm without parameters (OLMo 1).
    """

    dim: int
    eps: float
    kind: str = "rms"
    weight: bool = True
    bias: bool = False
    offset: bool = False
    heads: int | None = None

    def leaves(self, path: str) -> Iterator[Leaf]:
        one = f"{path}.{{e}}" if self.heads else path
        if self.weight:
            yield Leaf(f"{one}.weight", (self.dim,), "norms", copies=self.heads or 1)
        if self.bias:
            yield Leaf(f"{one}.bias", (self.dim,), "norms", copies=self.heads or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What one layer keeps per token: `heads` x (k_dim + v_dim) elements, of at most `window` tokens if there is one.

    kind: full | sliding | chunked | latent. full_*: the same if every query head kept its own K and V (for a latent
    cache: the expanded form). hf_heads: heads that transformers keeps where it repeats them before caching (Falcon).
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    window: int | None
    full_heads: int
    full_k_dim: int
    full_v_dim: int
    hf_heads: int | None = None

    @property
    def elements(self) -> int:
        return self.heads * (self.k_dim + self.v_dim)

    def expand(self) -> Cache:
        """The cache with full heads; the window stays."""
        return replace(self, kind="full" if self.kind == "latent" else self.kind, heads=self.full_heads,
                       k_dim=self.full_k_dim, v_dim=self.full_v_dim)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSparse:
    """Which blocks of `block` tokens a query sees: the last `local` ones and every `stride`-th before them.

    per_head: each head starts counting strides elsewhere, so that together they need every token; all are cached.
    """

    block: int
    local: int
    stride: int
    per_head: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Multi-head attention with grouped KV heads: MHA (n_kv = n_heads), GQA, MQA (n_kv = 1).

    window: tokens a layer sees, None for all; window_kind says sliding or chunked (Llama 4).
    q_norm / k_norm: on each head's row (dim = head_dim) or the whole projection (dim = heads x head_dim).
    norm_after_rope: they act on what is rotated already (Hunyuan).
    scale: factor on q.k, None for head_dim^-0.5. sinks: one learned logit per head (gpt-oss).
    shares_kv: reads another layer's K and V, so it has no such matrices and keeps nothing.
    gated: a sigmoid gate on the output, as wide as q.
    cross: K and V come from pictures (Llama 3.2 Vision), so nothing is kept for a token of text.
    v_norm: on each head's row of V (Gemma 3n and 4, where it has no weight).
    alibi_scaled: ALiBi's bias is multiplied by the scale as the scores are (Falcon RW).
    q_growth: (beta, positions, first): q at position m is multiplied by 1 + beta ln(1 + floor((m + first) / positions))
    (Ministral 3 with first 0, Llama 4's unrotated layers with 1).
    v_from_k: V is K before its norm and rotation; there is no v matrix (Gemma 4), but both are cached.
    sparse: the pattern of a block-sparse layer (Phi-3-small).
    exact_to: tokens up to which this is all it computes; past them its code does more (Qwen 1), which is not described.
    """

    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope: Rope | None = None
    alibi: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int | None = None
    window_kind: str = "sliding"
    sinks: bool = False
    scale: float | None = None
    softcap: float | None = None
    clip: float | None = None
    hf_cache_heads: int | None = None
    shares_kv: bool = False
    gated: bool = False
    v_from_k: bool = False
    norm_after_rope: bool = False
    sparse: BlockSparse | None = None
    cross: bool = False
    v_norm: Norm | None = None
    alibi_scaled: bool = False
    q_growth: tuple[float, int, int] | None = None
    exact_to: int | None = None

    @property
    def usual_scale(self) -> float:
        """head_dim^-0.5, which `scale` takes the place of."""
        return float(self.head_dim**-0.5)

    @lru_cache  # noqa: B019  parts are values: few, small and alive as long as the process
    def leaves(self) -> Leaves:
        q, kv = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        out = [
            *linear("q", q, self.hidden, "attention.q", self.qkv_bias),
            *(() if self.shares_kv else linear("k", kv, self.hidden, "attention.k", self.qkv_bias)),
            *(() if self.shares_kv or self.v_from_k else linear("v", kv, self.hidden, "attention.v", self.qkv_bias)),
            *linear("o", self.hidden, q, "attention.o", self.o_bias),
        ]
        if self.gated:
            out += linear("gate", q, self.hidden, "attention.q", self.qkv_bias)
        if self.q_norm:
            out += self.q_norm.leaves("q_norm")
        if self.k_norm and not self.shares_kv:
            out += self.k_norm.leaves("k_norm")
        if self.v_norm and not self.shares_kv:
            out += self.v_norm.leaves("v_norm")
        if self.sinks:
            out.append(Leaf("sinks", (self.n_heads,), "attention.other"))
        return tuple(out)

    def cache(self) -> Cache:
        """2 x n_kv_heads x head_dim elements per token."""
        return Cache(
            kind=self.window_kind if self.window else "full",
            heads=self.n_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            window=self.window,
            full_heads=self.n_heads,
            full_k_dim=self.head_dim,
            full_v_dim=self.head_dim,
            hf_heads=self.hf_cache_heads,
        )

    def caches(self) -> tuple[Cache, ...]:
        return () if self.shares_kv or self.cross else (self.cache(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLP:
    """Feed-forward: down(act(up(x))), or with a gate down(act(gate(x)) * up(x)) (SwiGLU, GeGLU).

    Activation swigluoai (gpt-oss) is down(g sigmoid(alpha g) (u + 1)), g = min(gate, limit), u = up within +-limit.
    """

    hidden: int
    ffn: int
    activation: str
    gated: bool = True
    bias: bool = False
    limit: float | None = None
    alpha: float | None = None

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        out: list[Leaf] = []
        if self.gated:
            out += linear("gate", self.ffn, self.hidden, "feed_forward.gate", self.bias)
        out += linear("up", self.ffn, self.hidden, "feed_forward.up", self.bias)
        out += linear("down", self.hidden, self.ffn, "feed_forward.down", self.bias)
        return tuple(out)


def ffn_width(dim: int, multiple_of: int, multiplier: float | None = None) -> int:
    """2/3 of 4 x dim, times the multiplier, rounded up to a multiple: SwiGLU's three matrices at the size of two.

    As Meta's own Llama code has it, from the whole part.
    """
    width = int(2 * (4 * dim) / 3)
    if multiplier is not None:
        width = int(multiplier * width)
    return multiple_of * ((width + multiple_of - 1) // multiple_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoE:
    """Mixture of experts: a router picks top_k of n_experts for each token; `shared` runs for every token.

    router_bias: a trained bias. correction_bias: DeepSeek-V3's load-balancing buffer, stored but not a parameter.
    shared_gate: a sigmoid gate (1, hidden) on the shared expert (Qwen2-MoE).
    routing: how the router's logits become a choice; None where that is not described: counted, but not run.
    """

    hidden: int
    n_experts: int
    top_k: int
    expert: MLP
    shared: MLP | None = None
    shared_gate: bool = False
    router_bias: bool = False
    correction_bias: bool = False
    routing: Routing | None = None

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        out = [*linear("router", self.n_experts, self.hidden, "feed_forward.router", self.router_bias)]
        if self.correction_bias:
            out.append(Leaf("router.correction_bias", (self.n_experts,), "feed_forward.router", "buffer"))
        out += under("experts.{e}", self.expert.leaves(), role="feed_forward.routed_experts", copies=self.n_experts)
        if self.shared:
            out += under("shared", self.shared.leaves(), role="feed_forward.shared_experts")
        if self.shared_gate:
            out += linear("shared_gate", 1, self.hidden, "feed_forward.shared_experts")
        return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """Token table (vocab, dim). scale: factor on its output (Gemma: sqrt(hidden)), None for 1."""

    vocab: int
    dim: int
    scale: float | None = None

    def leaves(self) -> Leaves:
        return (Leaf("weight", (self.vocab, self.dim), "token_embedding"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositions:
    """A trained table (rows, dim) added to the embedding; it ends at `rows` positions.

    offset: the row of position 0, with unused rows before it (OPT).
    """

    rows: int
    dim: int
    offset: int = 0

    def leaves(self) -> Leaves:
        return (Leaf("weight", (self.rows, self.dim), "position_embedding"),)


@dataclass(frozen=True, slots=True, kw_only=True)
class SinusoidalPositions:
    """Fixed sines and cosines added to the embedding (Attention Is All You Need, section 3.5); no parameters."""

    dim: int

    def leaves(self) -> Leaves:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Output projection (vocab, hidden). tied: it is the token embedding itself and owns no weight.

    unit_rows: each row is scaled to length 1 before use (Baichuan 2).
    """

    vocab: int
    hidden: int
    tied: bool
    bias: bool = False
    softcap: float | None = None
    scale: float | None = None
    unit_rows: bool = False

    def leaves(self) -> Leaves:
        out: list[Leaf] = []
        if not self.tied:
            out.append(Leaf("weight", (self.vocab, self.hidden), "lm_head"))
        if self.bias:
            out.append(Leaf("bias", (self.vocab,), "lm_head"))
        return tuple(out)


Mixer = Union[Attention, "LatentAttention"]  # noqa: UP007  a name that is not imported here cannot stand in |
FeedForward = MLP | MoE
Positions = LearnedPositions | SinusoidalPositions
