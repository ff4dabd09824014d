"""Which tensors `--quant int8` stores in 8 bits: the matrices of attention and feed-forward, one scale for each row.

Embedding, head, norms, routers and biases stay as they are, and so do the two matrices of latent attention that are
folded into the query and the output.
"""

from __future__ import annotations

ROLES = frozenset({"attention.q", "attention.k", "attention.v", "attention.o", "feed_forward.gate", "feed_forward.up",
                   "feed_forward.down", "feed_forward.routed_experts", "feed_forward.shared_experts"})
_KEPT = ("attn.k_b.weight", "attn.v_b.weight", "mlp.shared_gate.weight")


def in_int8(path: str, shape: tuple[int, ...], role: str) -> bool:
    """Whether a tensor of a layer, or of the model by its full name, is stored in 8 bits."""
    return len(shape) == 2 and role in ROLES and path.endswith(".weight") and not path.endswith(_KEPT)
