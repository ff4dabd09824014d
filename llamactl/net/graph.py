"""One token at a time as one recorded piece of GPU work: a CUDA graph over a cache of fixed size.

Launching each small kernel from Python costs a GPU more time than a token of a small model takes. Recorded once, a step
is replayed with one call; what changes from token to token, its place, is a number on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llamactl.net.attention import Step
from llamactl.net.cache import Cache, LayerCache
from llamactl.net.decoder import Decoder
from llamactl.net.moe import MoEBlock
from llamactl.net.positions import Turn
from llamactl.spec.parts import Attention


class StaticStep(Step):
    """A step of one token whose place is a tensor: every key of the cache is read, and later ones are masked."""

    def __init__(self, network: Decoder, cache: Cache, place: Tensor, keys: int) -> None:
        super().__init__(0, 1, device=place.device, dtype=network.dtype)
        self.place, self.end = place, keys
        for rope in network.ropes:
            table = network.turn(rope, 0, cache.length, None, cache.length)
            self.turns[rope] = Turn(table.cos.index_select(0, place), table.sin.index_select(0, place))

    def keep(self, cache: LayerCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        cache.k.index_copy_(2, self.place, k)
        cache.v.index_copy_(2, self.place, v)
        return cache.k[:, :, : self.end], cache.v[:, :, : self.end]

    def places(self) -> Tensor:
        return self.place

    def first_key(self, part: Attention) -> int:
        return 0

    def plain(self, part: Attention) -> bool:
        return False

    def causal(self, part: Attention) -> bool:
        return False

    def _mask(self, part: Attention) -> Tensor | None:
        return self.seen(part)[None, None]


def can_record(network: Decoder) -> bool:
    """Whether a step has no part that asks the device for numbers on the way, as a mixture's choice of experts does."""
    return not any(isinstance(m, MoEBlock) for m in network.modules())


def static_logits(network: Decoder, ids: Tensor, cache: Cache, place: Tensor, keys: int) -> Tensor:
    """(B, 1, V): what the decoder gives for one more token at `place`, by a StaticStep over the first `keys` keys."""
    return network.logits(network.stream(ids, StaticStep(network, cache, place, keys), cache))


class Recorded:
    """A decoder that replays its one-token steps. Called as the decoder is; prompts go to it as they are.

    Graphs are recorded for 512 keys, 1,024 and on, each when the text first needs it, so that a short text does not
    read a long cache. They belong to one cache; another one starts anew.
    """

    def __init__(self, network: Decoder) -> None:
        self.network, self.model = network, network.model
        self.cache: Cache | None = None
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def __call__(self, ids: Tensor, cache: Cache | None = None, *, last: bool = False) -> Tensor:
        if cache is None or ids.shape[1] != 1 or not 0 < cache.filled < cache.length or cache.pad is not None:
            return self.network(ids, cache, last=last)  # type: ignore[no-any-return]
        if cache is not self.cache:
            self.cache, self.graphs = cache, {}
            self.ids = torch.zeros_like(ids)
            self.place = torch.zeros(1, dtype=torch.long, device=ids.device)
        keys = bucket(cache.filled + 1, cache.length)
        self.ids.copy_(ids)
        self.place.fill_(cache.filled)
        if keys not in self.graphs:
            self.graphs[keys] = self._record(cache, keys)
        graph, logits = self.graphs[keys]
        graph.replay()
        cache.filled += 1
        return logits

    def _record(self, cache: Cache, keys: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Warm up on a side stream, as capturing wants it, then capture. Each run writes the same k and v again."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                static_logits(self.network, self.ids, cache, self.place, keys)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = static_logits(self.network, self.ids, cache, self.place, keys)
        return graph, logits


def bucket(keys: int, most: int) -> int:
    """The keys that a recorded step reads: 512, doubled until `keys` fit, at most the whole cache."""
    size = 512
    while size < keys:
        size *= 2
    return min(size, most)
