"""Mixtures of experts: the router's choice, and the chosen experts alone at work.

shapes: N tokens, E experts, K of them for each token
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from llamactl.net.blocks import FeedForward, Linear, empty, not_runnable
from llamactl.net.kernels import linear
from llamactl.spec.parts import MoE
from llamactl.spec.routing import Routing


class Router(nn.Module):
    """(N, hidden) -> the weights and the numbers of each token's experts, both (N, K)."""

    bias: Tensor | None
    correction_bias: Tensor | None

    def __init__(self, part: MoE, routing: Routing, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        self.routing, self.top_k = routing, part.top_k
        self.weight = empty(part.n_experts, part.hidden, dtype=dtype, device=device)
        self.bias = empty(part.n_experts, dtype=dtype, device=device) if part.router_bias else None
        self.register_buffer("correction_bias", torch.empty(part.n_experts, dtype=torch.float32, device=device)
                             if part.correction_bias else None)
        self._wide: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.choose(self.logits(x))
        return weights if self.routing.weights_fp32 else weights.to(x.dtype), chosen

    def logits(self, x: Tensor) -> Tensor:
        """(N, E), in fp32 from the matrix on where the family computes so."""
        if self.routing.fp32 != "logits" or x.dtype == torch.float32:
            return linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.float()
        return F.linear(x.float(), self._in_fp32(), bias)

    def _in_fp32(self) -> Tensor:
        """The matrix in fp32, made once for each matrix that is put here."""
        if self._wide is None or self._wide[0] is not self.weight:
            self._wide = (self.weight, self.weight.float())
        return self._wide[1]

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(N, E) logits -> fp32 weights and expert numbers."""
        r = self.routing
        if r.score == "sparsemixer":
            weights, chosen = mixed(logits, r.jitter, self.top_k)
        elif r.over == "chosen":
            top, chosen = logits.topk(self.top_k, dim=-1)
            weights = scored(top, r)
        else:
            score = scored(logits, r)
            order = score if self.correction_bias is None else score + self.correction_bias.float()
            chosen = within_groups(order, r).topk(self.top_k, dim=-1).indices
            weights = score.gather(-1, chosen)
        if r.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + r.eps).clamp_min(r.floor)
        return weights * r.scale, chosen


def scored(logits: Tensor, r: Routing) -> Tensor:
    """fp32 scores, as precise as the family's code has them."""
    wide = logits.float()
    score = wide.softmax(-1) if r.score == "softmax" else wide.sigmoid()
    return score.to(logits.dtype).float() if r.fp32 == "none" else score


def within_groups(order: Tensor, r: Routing) -> Tensor:
    """(N, E) with -inf for the experts outside each token's best groups."""
    if r.groups == 1:
        return order
    by_group = order.view(len(order), r.groups, -1)
    best = by_group.amax(-1) if r.group_score == "max" else by_group.topk(2, dim=-1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(r.groups_kept, dim=-1).indices, True)
    return by_group.masked_fill(~kept[..., None], float("-inf")).view(order.shape)


def mixed(logits: Tensor, jitter: float, top_k: int) -> tuple[Tensor, Tensor]:
    """SparseMixer without its training noise: the best expert of those left, weighed against the ones close to it."""
    left = logits
    weights, chosen = [], []
    for _ in range(top_k):
        best, at = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp_min(best) > 2 * jitter
        weights.append(left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, at))
        chosen.append(at)
        left = left.scatter(-1, at, float("-inf"))
    return torch.cat(weights, -1).float(), torch.cat(chosen, -1)


class MoEBlock(nn.Module):
    """Sum over a token's experts of weight x expert(x), beside what runs for every token. (..., hidden) both ways.

    Only experts that some token chose are read. Raises InputRefused not-runnable where the choice is not described or
    cannot be made.
    """

    def __init__(self, part: MoE, *, dtype: torch.dtype, device: Any = "meta") -> None:
        super().__init__()
        self.part, self.routing = part, checked(part)
        self.router = Router(part, self.routing, dtype=dtype, device=device)
        self.experts = nn.ModuleList(FeedForward(part.expert, dtype=dtype, device=device)
                                     for _ in range(part.n_experts))
        self.shared = FeedForward(part.shared, dtype=dtype, device=device) if part.shared else None
        self.shared_gate = Linear(part.hidden, 1, dtype=dtype, device=device) if part.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.part.hidden)
        weights, chosen = self.router(rows)
        y = self._one(rows, weights, chosen) if rows.shape[0] == 1 else self._many(rows, weights, chosen)
        if self.shared is not None:
            beside = self.shared(rows)
            y = y + (beside if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)) * beside)
        return y.view(x.shape)

    def _one(self, row: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """One token: its K experts, one after the other."""
        numbers = chosen[0].tolist()
        if self.routing.scales_input:
            out = torch.cat([self.experts[e](row * weights[:, n : n + 1]) for n, e in enumerate(numbers)])
            return out.float().sum(0, keepdim=True).to(row.dtype)
        out = torch.cat([self.experts[e](row) for e in numbers])
        return (weights.float() @ out.float()).to(row.dtype)

    def _many(self, rows: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Tokens sorted by expert: one pass through each expert that any token chose, summed in fp32.

        A token stands once in an expert's batch, so that no sum depends on the order of threads.
        """
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        tokens, by_expert = order // self.part.top_k, weights.flatten()[order, None]
        out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
        start = 0
        for e, count in enumerate(flat.bincount(minlength=self.part.n_experts).tolist()):
            if not count:
                continue
            at, weight = tokens[start : start + count], by_expert[start : start + count]
            start += count
            if self.routing.scales_input:
                out.index_add_(0, at, self.experts[e](rows[at] * weight).float())
            else:
                out.index_add_(0, at, self.experts[e](rows[at]).float() * weight)
        return out.to(rows.dtype)


def checked(part: MoE) -> Routing:
    """The routing of `part`, if this file computes it and it can choose top_k experts."""
    r = part.routing
    if r is None:
        raise not_runnable(f"how {part.top_k} of its {part.n_experts:,} experts are chosen: the routing of this config "
                           "is not described")
    for what, word, known in (("score", r.score, ("softmax", "sigmoid", "sparsemixer")), ("fp32", r.fp32,
                              ("logits", "score", "none")), ("over", r.over, ("all", "chosen")),
                              ("group score", r.group_score, ("max", "top2"))):
        if word not in known:
            raise not_runnable(f"a router whose {what} is {word!r}")
    if (r.over == "chosen" or r.score == "sparsemixer") and (part.correction_bias or r.groups > 1):
        raise not_runnable("a router that ranks logits, but has a correction or groups for scores")
    size, rest = divmod(part.n_experts, r.groups)
    pairs = r.groups == 1 or r.group_score != "top2" or size > 1
    if rest or r.groups_kept > r.groups or r.groups_kept * size < part.top_k or not pairs:
        raise not_runnable(f"a choice of {part.top_k} from {part.n_experts:,} experts in {r.groups} groups, of which "
                           f"{r.groups_kept} are kept")
    return r
