"""What a wrong port computes and no family does, as values; net/slips.py computes it."""

from __future__ import annotations

from dataclasses import dataclass

from llamactl.spec.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Slips:
    """Of one layer. rotates: the rotations of q, k and v, None as the attention says (rope, rope, none).

    mask: causal | none (every key is seen) | ahead (one more) | strict (not its own, but the first token) |
    strict-uniform (the first token sees all). kv_order: which KV head query head h reads: repeat h // G | tile h % K |
    reversed | first | rolled. attn_in, mlp_in: what the branch is added to: stream | normed (what it read) | none.
    mlp: "" | gate-only down(act(gate)) | product down(act(gate up)) | up-only down(up) | both down(act(gate) act(up))
    | linear, without the activation.
    """

    rotates: tuple[Rope | None, Rope | None, Rope | None] | None = None
    mask: str = "causal"
    kv_order: str = "repeat"
    attn_in: str = "stream"
    mlp_in: str = "stream"
    mlp: str = ""
