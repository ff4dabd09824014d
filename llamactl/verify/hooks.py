"""What flows through somebody's torch module: the input and the output of every block, and of what is inside it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PARTS_BYTES = 1 << 30  # of what is kept from inside the blocks; beyond it nothing of it is kept

Parts = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Captured:
    """The stream of one forward, block by block in the order in which they ran; fp32, or fp64 where it is computed so.

    names: the blocks' paths in the module. embedded (T, D): the input of the first. inputs, outputs: (T, D) each.
    parts: of each block {path inside it: (input, output)} of its children and theirs, without the batch; empty where
    they were not asked for or took more than PARTS_BYTES. head_input: of the last Linear with the vocabulary's width,
    None without one. notes: (code, message).
    """

    names: tuple[str, ...]
    embedded: Tensor
    inputs: list[Tensor]
    outputs: list[Tensor]
    parts: list[Parts]
    head_input: Tensor | None
    notes: tuple[tuple[str, str], ...] = ()


def blocks_of(module: nn.Module, layers: int | None = None) -> list[tuple[str, nn.Module]]:
    """The (path, block) list of a model: the list of `layers` modules with the most parameters, else the one of at
    least two with the most; [] without one. Of a mixed nn.Sequential only the commonest kind counts.
    """
    found: list[tuple[bool, int, list[tuple[str, nn.Module]]]] = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        members = [(f"{path}.{n}" if path else n, m) for n, m in part.named_children()]
        if isinstance(part, nn.ModuleDict) and not all(n.isdigit() for n, _ in part.named_children()):
            continue
        if isinstance(part, nn.Sequential) and len(members) != layers:
            kinds = [type(m) for _, m in members]
            weight = {k: sum(_parameters(m) for _, m in members if type(m) is k) for k in kinds}
            members = [(n, m) for n, m in members if type(m) is max(kinds, key=lambda k: (kinds.count(k), weight[k]))]
        size = sum(_parameters(m) for _, m in members)
        if size and (len(members) == layers or len(members) > 1):
            found.append((len(members) == layers, size, members))
    return max(found, key=lambda x: x[:2])[2] if found else []


class Recorder:
    """Hooks on the blocks of a module for one forward of `tokens` tokens, and what they saw.

    parts: numbers of the blocks, by the order of running, whose inside is kept; None: of all. fed: in place of the
    input of the n-th block that runs, fed[n] (T, D) goes into it.
    """

    def __init__(self, module: nn.Module, tokens: int, *, layers: int | None = None,
                 parts: Collection[int] | None = None, fed: list[Tensor] | None = None) -> None:
        self.module, self.tokens, self.layers, self.wanted, self.fed = module, tokens, layers, parts, fed
        self.names: list[str] = []
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.parts: list[Parts] = []
        self.heads: dict[int, Tensor] = {}
        self.kept, self.spilt = 0, False
        self._inside: list[int] = []  # the block that is running
        self._before: dict[tuple[int, str], Tensor] = {}
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    @contextmanager
    def on(self) -> Iterator[None]:
        """Hooks are there inside, and gone afterwards whatever happens."""
        handles: list[Any] = []
        try:
            for name, block in blocks_of(self.module, self.layers):
                handles.append(block.register_forward_pre_hook(self._enter(name), with_kwargs=True))
                handles.append(block.register_forward_hook(self._leave()))
                for path, part in block.named_modules():
                    if path and path.count(".") < 2:
                        handles.append(part.register_forward_pre_hook(self._part_in(path), with_kwargs=True))
                        handles.append(part.register_forward_hook(self._part_out(path)))
            for part in self.module.modules():
                if isinstance(part, nn.Linear):
                    handles.append(part.register_forward_pre_hook(self._head, with_kwargs=True))
            yield
        finally:
            for h in handles:
                h.remove()
            self._before.clear()
            self._copies.clear()

    def captured(self, vocab: int) -> Captured | None:
        """What was seen; None where no block ran on a stream of one row a token. vocab: columns of the logits."""
        if not self.inputs or len(self.outputs) < len(self.inputs):
            return None
        notes: tuple[tuple[str, str], ...] = ()
        if self.spilt:
            notes += (("module-parts", f"what flows inside the blocks takes more than {PARTS_BYTES >> 20:,} MiB "
                       "and was not kept"),)
        if self.layers is not None and len(self.inputs) != self.layers:
            notes += (("module-blocks", f"{len(self.inputs):,} blocks ran, the model has {self.layers:,} layers"),)
        return Captured(names=tuple(self.names), embedded=self.inputs[0], inputs=self.inputs, outputs=self.outputs,
                        parts=self.parts, head_input=self.heads.get(vocab), notes=notes)

    def _enter(self, name: str) -> Callable[..., Any]:
        def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            n = len(self.inputs)
            self._inside.append(n)
            place = self._stream(args, kwargs)
            if place is None:
                self._inside[-1] = -1
                return None
            x = args[place] if isinstance(place, int) else kwargs[place]
            changed = None
            if self.fed is not None and n < len(self.fed):
                x = self.fed[n].to(device=x.device, dtype=x.dtype, copy=True).reshape(x.shape)  # it may be written to
                if isinstance(place, int):
                    changed = (*args[:place], x, *args[place + 1 :]), kwargs
                else:
                    changed = args, {**kwargs, place: x}
            self.names.append(name)
            self.inputs.append(self._copy(x))
            self.parts.append({})
            return changed

        return hook

    def _leave(self) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, out: Any) -> None:
            n = self._inside.pop()
            x = _first(out)
            if n >= 0 and x is not None and x.shape[-2:] == self.inputs[n].shape:
                self.outputs.append(self._copy(x))

        return hook

    def _part_in(self, path: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if (n := self._running(path)) is not None:
                x = next((v for v in (*args, *kwargs.values()) if _is_float(v)), None)
                if x is not None:
                    self._before[n, path] = self._keep(x)

        return hook

    def _part_out(self, path: str) -> Callable[..., None]:
        def hook(part: nn.Module, args: Any, out: Any) -> None:
            n, x = self._running(path), _first(out)
            if n is not None and x is not None and (before := self._before.pop((n, path), None)) is not None:
                self.parts[n][path] = before, self._keep(x)
                if self.kept > PARTS_BYTES:
                    self.spilt = True
                    self.parts = [{} for _ in self.parts]
                    self._before.clear()

        return hook

    def _running(self, path: str) -> int | None:
        """The block that is running, where its inside is asked for and `path` has not been seen yet."""
        n = self._inside[-1] if self._inside else -1
        if n < 0 or self.spilt or (self.wanted is not None and n not in self.wanted) or path in self.parts[n]:
            return None
        return n

    def _head(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._inside and args and _is_float(args[0]) and args[0].shape[-2] == self.tokens:
            assert isinstance(part, nn.Linear)
            self.heads[part.out_features] = self._copy(args[0])

    def _stream(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str | None:
        """Where the hidden states are among the arguments: the first (T, D) or (1, T, D)."""
        both: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return next((at for at, v in both if _is_float(v) and v.shape[-2] == self.tokens and v.dim() < 4
                     and v.numel() == self.tokens * v.shape[-1]), None)

    def _keep(self, x: Tensor) -> Tensor:
        """A copy of `x` without its batch, made once for as long as nobody writes to `x`."""
        seen = self._copies.get(id(x))
        if seen is not None and seen[0]() is x and seen[1] == x._version:
            return seen[2]
        copy = self._copy(x)
        self.kept += copy.nbytes
        self._copies[id(x)] = weakref.ref(x), x._version, copy
        return copy

    def _copy(self, x: Tensor) -> Tensor:
        x = x.detach()
        x = x[0] if x.dim() > 2 and x.shape[0] == 1 else x
        return x.to(device="cpu", dtype=torch.promote_types(x.dtype, torch.float32), copy=True)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() >= 2


def _first(out: Any) -> Tensor | None:
    """The tensor that a module gave: itself, the first of a tuple, or the first of an output object's values."""
    if hasattr(out, "to_tuple"):
        out = out.to_tuple()
    if isinstance(out, dict):
        out = tuple(out.values())
    if isinstance(out, tuple | list):
        out = out[0] if out else None
    return out if isinstance(out, Tensor) and _is_float(out) else None


def _parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
