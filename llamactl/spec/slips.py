"""What a wrong port computes and no family does, as values; net/slips.py computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from llamactl.spec.rope import Rope

OTHER = {"half": "adjacent", "adjacent": "half"}  # lane orders of RoPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """How one of q, k, v is rotated beside what the layer's RoPE says: lanes of the other order, against the direction,
    positions moved by `start`.
    """

    other_pairs: bool = False
    backwards: bool = False
    start: int = 0

    def of(self, rope: Rope) -> Rope:
        return replace(rope, pairs=OTHER[rope.pairs] if self.other_pairs else rope.pairs,
                       backwards=rope.backwards is not self.backwards, start=rope.start + self.start)


Sides = tuple[Rotation | None, Rotation | None, Rotation | None]
USUAL: Sides = (Rotation(), Rotation(), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slips:
    """Of one layer. rotates: whether and how q, k and v are rotated.

    mask: causal | none (every key is seen) | ahead (one more) | strict (not its own, but the first token) |
    strict-uniform (the first token sees all). kv_order: which KV head query head h reads: repeat h // G | tile h % K |
    reversed | first | rolled. attn_in, mlp_in: what the branch is added to: stream | normed (what it read) | none.
    mlp: "" | gate-only down(act(gate)) | product down(act(gate up)) | up-only down(up) | both down(act(gate) act(up))
    | linear, without the activation.
    """

    rotates: Sides = USUAL
    mask: str = "causal"
    kv_order: str = "repeat"
    attn_in: str = "stream"
    mlp_in: str = "stream"
    mlp: str = ""

    def ropes(self, rope: Rope | None) -> tuple[Rope | None, ...]:
        """The rotations of q, k and v where the layer's RoPE is `rope`."""
        return tuple(None if rope is None or side is None else side.of(rope) for side in self.rotates)
