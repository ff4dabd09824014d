"""A network made ready to write fast: one token's step compiled, or on a GPU recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence

import torch

from llamactl.errors import NotAvailable
from llamactl.net import aot
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder
from llamactl.net.device import is_out_of_memory
from llamactl.net.generate import Network, generate
from llamactl.net.graph import Recorded, can_record
from llamactl.net.sample import Sampling


@torch.inference_mode()
def ready(network: Decoder, ids: Sequence[int], cache: Cache, *, compile: bool = False, identity: Iterable[str] = (),
          say: Callable[[str], None] | None = None) -> Network:
    """What is to be called in place of `network` for a text after `ids`; the cache is empty again afterwards.

    compile: on a CPU one step as a whole, kept on disk for the next start (aot.py); else block by block. A GPU records
    a step where it can, and without `compile` a CPU has nothing to prepare.
    identity: what tells these weights from all others. say: told that a compilation begins, and how long it may take.
    Raises NotAvailable (no-compiler, cache-owner) and OutputError (cache-folder).
    """
    if compile and network.device.type == "cpu" and aot.can_compile(network):
        return aot.compiled(network, cache, identity, say=say)
    if compile:
        compile_blocks(network, ids, cache)
    if network.device.type == "cuda" and len(ids) < cache.length and can_record(network):
        recorded = Recorded(network)
        cache.filled = len(ids)  # as if the prompt stood there: what is read does not matter yet
        recorded(torch.tensor([[ids[-1]]], device=network.device), cache, last=True)
        cache.rewind()
        return recorded
    return network


def compile_blocks(network: Decoder, ids: Sequence[int], cache: Cache) -> None:
    """Compile every block, and make the kernels that a text after `ids` needs. Equal blocks share theirs."""
    for block in network.layers:
        block.compile(dynamic=True)
    # The first tokens teach which numbers change from step to step; what is learned then is compiled then.
    steps = min(4, cache.length - len(ids) + 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remarks on its own inner workings
            generate(network, ids, max_new=steps, sampling=Sampling(temperature=0.0), cache=cache)
    except Exception as e:
        if is_out_of_memory(e) or "torch._" not in type(e).__module__:
            raise
        said = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise NotAvailable("no-compiler", f"torch.compile failed: {said[:300]}",
                           help="go on without --compile, or install a C++ compiler") from e
    cache.rewind()
