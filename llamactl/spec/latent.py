"""Multi-head latent attention (DeepSeek-V2 and its heirs) and the indexer of its sparse form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from llamactl.spec.parts import Cache, Leaf, Leaves, Norm, linear, under
from llamactl.spec.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """DeepSeek-V3.2's lightning indexer: small heads that choose which tokens attention reads (DSA).

    q comes from the query latent of width q_rank; one key of head_dim per token is cached, shared by its heads.
    top_k: tokens that attention then reads. rope: of the first dimensions of q and k.
    """

    hidden: int
    q_rank: int
    heads: int
    head_dim: int
    eps: float = 1e-6
    top_k: int | None = None
    rope: Rope | None = None

    def leaves(self) -> Leaves:
        return (
            *linear("q", self.heads * self.head_dim, self.q_rank, "attention.other"),
            *linear("k", self.head_dim, self.hidden, "attention.other"),
            *Norm(dim=self.head_dim, eps=self.eps, kind="layer", bias=True).leaves("k_norm"),
            *linear("weights", self.heads, self.hidden, "attention.other"),
        )

    def cache(self) -> Cache:
        """head_dim elements per token."""
        return Cache(kind="indexer", heads=1, k_dim=self.head_dim, v_dim=0, window=None, full_heads=1,
                     full_k_dim=self.head_dim, full_v_dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): K and V are rebuilt from one cached latent.

    q_rank None: q is one projection. Cached per token: kv_rank + qk_rope elements, shared by all heads.
    """

    hidden: int
    n_heads: int
    q_rank: int | None
    kv_rank: int
    qk_nope: int
    qk_rope: int
    v_dim: int
    eps: float
    rope: Rope | None = None
    bias: bool = False
    scale: float | None = None
    indexer: Indexer | None = None

    @property
    def usual_scale(self) -> float:
        """(qk_nope + qk_rope)^-0.5, which `scale` takes the place of."""
        return float((self.qk_nope + self.qk_rope) ** -0.5)

    @lru_cache  # noqa: B019
    def leaves(self) -> Leaves:
        q = self.n_heads * (self.qk_nope + self.qk_rope)
        out: list[Leaf] = []
        if self.q_rank is None:
            out += linear("q", q, self.hidden, "attention.q")
        else:
            out += linear("q_a", self.q_rank, self.hidden, "attention.q", self.bias)
            out += Norm(dim=self.q_rank, eps=self.eps).leaves("q_a_norm")
            out += linear("q_b", q, self.q_rank, "attention.q")
        out += linear("kv_a", self.kv_rank + self.qk_rope, self.hidden, "attention.other", self.bias)
        out += Norm(dim=self.kv_rank, eps=self.eps).leaves("kv_a_norm")
        out += linear("k_b", self.n_heads * self.qk_nope, self.kv_rank, "attention.k")
        out += linear("v_b", self.n_heads * self.v_dim, self.kv_rank, "attention.v")
        out += linear("o", self.hidden, self.n_heads * self.v_dim, "attention.o", self.bias)
        if self.indexer:
            out += under("indexer", self.indexer.leaves())
        return tuple(out)

    def cache(self) -> Cache:
        """kv_rank + qk_rope elements per token; expanded, every head keeps qk_nope + qk_rope + v_dim."""
        return Cache(
            kind="latent",
            heads=1,
            k_dim=self.kv_rank + self.qk_rope,
            v_dim=0,
            window=None,
            full_heads=self.n_heads,
            full_k_dim=self.qk_nope + self.qk_rope,
            full_v_dim=self.v_dim,
        )

    def caches(self) -> tuple[Cache, ...]:
        return (self.cache(), self.indexer.cache()) if self.indexer else (self.cache(),)
