"""Processes that run one model together, over torch.distributed: joining, summing, gathering, and one voice for errors.

Gloo between CPUs, NCCL between GPUs, one device for each rank. Whoever joins got its rank from torchrun, or from
llamactl's own launcher, which hands over a file to meet at.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from llamactl.errors import NotAvailable, OutputError
from llamactl.net.device import is_out_of_memory

JOIN = timedelta(seconds=120)
WAIT = timedelta(minutes=30)  # of one rank for another: also for one that waits for its prompt, or for a pager
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Group:
    """This process among the others. device: its own."""

    def __init__(self, rank: int, world: int, device: torch.device, store: Store) -> None:
        self.rank, self.world, self.device = rank, world, device
        self._store = store

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of equally shaped tensors; `x` itself is overwritten where it is contiguous."""
        x = x.contiguous()
        try:
            dist.all_reduce(x)
        except RuntimeError as e:
            raise self._lost(e) from e
        return x

    def gather(self, x: Tensor) -> Tensor:
        """(world, ...): `x` of every rank, equally shaped."""
        parts = [torch.empty_like(x) for _ in range(self.world)]
        try:
            dist.all_gather(parts, x.contiguous())
        except RuntimeError as e:
            raise self._lost(e) from e
        return torch.stack(parts)

    def numbers(self, *values: int) -> list[list[int]]:
        """Integers of every rank, rank by rank."""
        found: list[list[int]] = self.gather(torch.tensor(values, dtype=torch.int64, device=self.device)).tolist()
        return found

    def share(self, data: Any) -> Any:
        """What rank 0 gives, on every rank; anything that JSON holds."""
        raw = json.dumps(data).encode() if self.rank == 0 else b""
        (size, *_), *_ = self.numbers(len(raw))
        at = torch.zeros(size, dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            at.copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        try:
            dist.broadcast(at, src=0)
        except RuntimeError as e:
            raise self._lost(e) from e
        return json.loads(bytes(at.tolist()))

    def agree(self, enough: bool) -> bool:
        """Rank 0's word, on every rank."""
        return bool(self.numbers(enough)[0][0])

    def speaks(self) -> bool:
        """Whether this process is the first that has something to say of a failure; the others keep silent."""
        try:
            return int(self._store.add("said", 1)) == 1
        except RuntimeError:  # the store is gone with the process that kept it
            return False

    def leave(self) -> None:
        """The orderly end: every rank is here."""
        dist.destroy_process_group()

    def _lost(self, e: RuntimeError) -> Exception:
        """What a failed exchange means: the memory's end, or another process's."""
        if is_out_of_memory(e):
            return e
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        return OutputError("rank-lost", f"process {self.rank} of {self.world} lost the others: {said[:200]}",
                           help="see what ended them; often it is memory")


def own_device(word: str, local_rank: int, local_world: int) -> torch.device:
    """The device of one of `local_world` ranks on this machine, for auto | cuda | cpu; each GPU serves one.

    Raises NotAvailable (no-device).
    """
    if word == "mps":
        raise NotAvailable("no-device", "mps is one device, and each process needs its own", help="try --device cpu")
    if word == "cpu" or (word == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count < local_world:
        raise NotAvailable("no-device", f"{local_world} processes need a cuda device each, and there are {count}",
                           help="fewer processes, or --device cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def join(rank: int, world: int, device: torch.device, *, file: str | None = None, alone: bool = False) -> Group:
    """Meet the other ranks: at `file`, or as MASTER_ADDR and MASTER_PORT say. alone: all are on this machine.

    Raises NotAvailable (rank-join) where they do not all come within two minutes.
    """
    if alone:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # nothing of this listens to a network
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        where = "env://" if file is None else f"file://{file}"
        store: Store
        store, rank, world = next(rendezvous(where, rank, world, timeout=JOIN))
        store = PrefixStore("llamactl", store)
        if store.add("came", 1) == world:
            store.set("all", "here")
        store.wait(["all"], JOIN)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=WAIT)
    except (RuntimeError, ValueError) as e:
        said = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise NotAvailable("rank-join", f"the {world} processes did not meet: {said[:200]}",
                           help="start all of them with torchrun, or with --tp") from e
    return Group(rank, world, device, store)
