"""Weights as an edited model reads them: spec.taken carried out on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from llamactl.errors import InputRefused
from llamactl.net.decoder import Source
from llamactl.spec.misread import LINEAR
from llamactl.spec.model import Model
from llamactl.spec.naming import turned_rows
from llamactl.spec.parts import Attention
from llamactl.spec.taken import Taken

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn,
           "fp8_e5m2": torch.float8_e5m2}
_LINEAR = tuple(f"{n}.weight" for n in LINEAR)


class Taking:
    """A Source of `model`'s tensors out of `source`, which holds those of the model before its edits.

    Errors: those of the source; InputRefused edit-tensor where an edit has no meaning for a tensor it names.
    """

    def __init__(self, source: Source, model: Model, others: Mapping[str, Tensor] | None = None) -> None:
        """others: the tensors, by canonical name, that stand in for those the model takes from elsewhere."""
        self.source, self.model, self.groups, self.others = source, model, model.taken, others or {}

    def tensor(self, name: str) -> Tensor:
        """As the edits leave it; a view of the source's where they do not touch it."""
        return self._get(name, len(self.groups))

    def _get(self, name: str, upto: int) -> Tensor:
        layer, path = _split(name)
        for n in range(upto - 1, -1, -1):
            for t in self.groups[n]:
                if t.layers is not None and layer not in t.layers:
                    continue
                if t.how == "swap" and path == t.arg:
                    return self._get(_joined(layer, t.at), n)
                if _matches(t, path, layer):
                    return self._made(t, layer, path, n)
        return self.source.tensor(name)

    def _made(self, t: Taken, layer: int | None, path: str, n: int) -> Tensor:
        if t.how in ("swap", "from"):
            return self._get(_joined(layer, str(t.arg)), n)
        if t.how == "order":
            assert isinstance(t.arg, tuple)
            assert layer is not None
            return self._get(f"layers.{t.arg[layer]}.{path}", n)
        if t.how == "fused":
            return self._fused(t, layer, path, n)
        if t.how == "another":
            name = _joined(layer, path)
            if name not in self.others:
                raise InputRefused("edit-tensor", f"there is no other {name}")
            return self.others[name]
        w = self._get(_joined(layer, path), n)
        if t.how == "transposed":
            return w.t().contiguous()
        if t.how == "zero":
            return torch.zeros_like(w)
        if t.how == "first":
            return w[:1].expand(w.shape)
        if t.how == "ones":
            return torch.ones_like(w)
        if t.how == "scale":
            assert isinstance(t.arg, float)
            return w.float() * t.arg
        if t.how == "shift":
            assert isinstance(t.arg, int)
            return w[(torch.arange(len(w)) + t.arg).clamp(0, len(w) - 1)]
        if t.how == "roll":
            assert isinstance(t.arg, int)
            return w.roll(-t.arg, 0)
        if t.how == "round":
            return rounded(w, str(t.arg))
        part = self._attention(layer, path)
        own = part.n_kv_heads if path.startswith(("attn.k", "attn.v")) else part.n_heads
        if t.how == "rows":
            stored, canonical = str(t.arg).split(">")
            groups = t.heads or own
            head = len(w) // groups
            whole = part.rope is None or part.rope.dim == part.head_dim
            dim = head if whole or part.rope is None else min(part.rope.dim, head)
            if len(w) % groups or dim % 2:
                raise InputRefused("edit-tensor", f"{path} has {len(w)} rows, which are not {groups} heads of pairs")
            return w[turned_rows(stored, canonical, groups, head, dim)]
        if t.how == "heads":
            return _reordered(w, own, str(t.arg), columns=path == "attn.o.weight")
        raise InputRefused("edit-tensor", f"{t.how!r} is nothing that can be done to {path}")

    def _attention(self, layer: int | None, path: str) -> Attention:
        # An order of layers may have left some out, and numbers below it are those of before.
        part = None if layer is None else self.model.layers[min(layer, len(self.model.layers) - 1)].attn
        if not isinstance(part, Attention):
            raise InputRefused("edit-tensor", f"{path} does not belong to heads")
        return part

    def _fused(self, t: Taken, layer: int | None, path: str, n: int) -> Tensor:
        """The rows at which a reader of another order finds this tensor in the fused one."""
        written, read = str(t.arg).split(">")
        leaf = path.rpartition(".")[2]
        names = ["mlp.gate", "mlp.up"] if path.startswith("mlp") else ["attn.q", "attn.k", "attn.v"]
        parts = [self._get(_joined(layer, f"{x}.{leaf}"), n) for x in names]
        groups = self._attention(layer, path).n_kv_heads if len(parts) == 3 else 1
        sizes = [len(p) for p in parts]
        at = torch.arange(sum(sizes))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        places = [_laid(written, sizes, groups), _laid(read, sizes, groups)]
        rows = torch.cat(parts)
        whole = torch.empty_like(rows)
        for p, own in enumerate(places[0]):
            whole[own] = rows[at[starts[p] : starts[p] + sizes[p]]]
        return whole[places[1][names.index(path.rpartition(".")[0])]]


def _laid(order: str, sizes: list[int], groups: int) -> list[Tensor]:
    """For each part, at which rows of the fused tensor its rows lie."""
    total = sum(sizes)
    if order in ("qkv", "gu") or (len(order) == 3 and set(order) == set("qkv")) or order == "ug":
        names = "qkv" if len(sizes) == 3 else "gu"
        out: dict[str, Tensor] = {}
        start = 0
        for x in order:
            size = sizes[names.index(x)]
            out[x] = torch.arange(start, start + size)
            start += size
        return [out[x] for x in names]
    if order == "interleaved" or (order == "per_lane" and len(set(sizes)) == 1):
        return [torch.arange(n, total, len(sizes)) for n in range(len(sizes))]
    if order == "per_head":
        wide, out_, start = total // groups, [], 0
        for size in sizes:
            each = size // groups
            out_.append((torch.arange(groups)[:, None] * wide + start + torch.arange(each)).flatten())
            start += each
        return out_
    raise InputRefused("edit-tensor", f"{order!r} is no order of tensors of {sizes} rows")


def _reordered(w: Tensor, heads: int, how: str, *, columns: bool) -> Tensor:
    """reversed and rolled: whole heads; lanes: row h D + d taken from d H + h."""
    x = w.t() if columns else w
    split = x.reshape(heads, -1, *x.shape[1:])
    if how == "lanes":
        out = x.reshape(-1, heads, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
    elif how == "reversed":
        out = split.flip(0).reshape(x.shape)
    elif how == "rolled":
        out = split.roll(1, 0).reshape(x.shape)
    else:
        raise InputRefused("edit-tensor", f"{how!r} is no order of heads")
    return out.t() if columns else out


def rounded(w: Tensor, kind: str) -> Tensor:
    """Rounded to a narrower type and widened: fp8 saturates, "scaled" and integers by the largest value of each row
    (int8, int4: symmetric; a vector as one row)."""
    x = w.float()
    if kind == "jitter":  # another rounding to bf16 of what was rounded once: half a step up or down
        draw = torch.rand(x.shape, generator=torch.Generator().manual_seed(x.numel()))
        return x * (1 + (draw - 0.5) * 2**-8)
    if kind.startswith("int"):
        top = float(2 ** (int(kind[3:]) - 1) - 1)
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / top
        return (x / scale).round().clamp(-top, top) * scale
    scaled, plain = kind.endswith("_scaled"), kind.removesuffix("_scaled")
    if plain not in _FLOATS:
        raise InputRefused("edit-tensor", f"{kind!r} is no type to round to")
    kind_ = _FLOATS[plain]
    if scaled:
        s = x.abs().max().clamp_min(1e-30) / torch.finfo(kind_).max
        return (x / s).to(kind_).float() * s
    top = torch.finfo(kind_).max
    return (x.clamp(-top, top) if kind_.itemsize == 1 else x).to(kind_).float()


def touches(group: Sequence[Taken], path: str, layer: int | None) -> bool:
    """Whether an edit reads the tensor at `path` of that layer otherwise."""
    return any(_matches(t, path, layer) or (t.how == "swap" and t.arg == path)
               for t in group if t.layers is None or layer in t.layers)


def _matches(t: Taken, path: str, layer: int | None) -> bool:
    if t.how == "order":
        return layer is not None
    if t.at == "linear":
        return path.endswith(_LINEAR)
    return t.at == path or (t.at == "*" or ("*" in t.at and fnmatchcase(path, t.at)))


def _split(name: str) -> tuple[int | None, str]:
    """"layers.3.attn.q.weight" -> (3, "attn.q.weight"); without a layer the name itself."""
    if name.startswith("layers."):
        _, i, path = name.split(".", 2)
        return int(i), path
    return None, name


def _joined(layer: int | None, path: str) -> str:
    return path if layer is None else f"layers.{layer}.{path}"
