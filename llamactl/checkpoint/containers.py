"""How quantised weights lie in a file, one rule a container: the shapes of the packed tensor and of those beside it
give the shape of the weight that they stand for.

    bitsandbytes 4-bit   X U8 (n/2, 1)                with X.quant_state.bitsandbytes__nf4|fp4 (JSON with the shape)
    bitsandbytes 8-bit   .weight I8 (out, in)         with .SCB (out)
    GPTQ                 .qweight I32 (in*b/32, out)  with .scales (groups, out), .qzeros (groups, out*b/32), .g_idx
    AWQ                  .qweight I32 (in, out*b/32)  with .scales (groups, out), .qzeros (groups, out*b/32)
    compressed-tensors   .weight_packed I32 (out, in*b/32) with .weight_shape (the data: out, in), .weight_scale, ...
    NVFP4, MXFP4         .weight_packed or .weight U8 (out, in/2) with .weight_scale (out, in/16 or in/32)
    MXFP4 of gpt-oss     X_blocks U8 (..., out, g, 16) with X_scales U8 (..., out, g)
    fp8, int8            X F8_* or I8, as it is       with X_scale_inv or X_scale
    MLX                  .weight U32 (out, in*b/32)   with .scales (out, groups), .biases

Sources: the packing code of bitsandbytes, AutoGPTQ, AutoAWQ, compressed-tensors, modelopt, transformers and mlx. A rule
that finds anything else raises Unread: a weight is measured or it is not, never estimated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple, Protocol

from llamactl.errors import InputRefused
from llamactl.spec.jsontext import parse_json

Shape = tuple[int, ...]
_INT32 = ("I32", "U32")


class Stored(Protocol):
    """One tensor by header."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def elements(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class Unread(Exception):
    """Why a packed tensor's weight cannot be told."""


class Packed(NamedTuple):
    """A packed tensor, those beside it by suffix, the config's quantisation words, and a way to small data.

    stem: the name without the suffix. peek: the bytes of a small tensor, or None where data cannot be had.
    """

    stem: str
    main: Stored
    beside: Mapping[str, Stored]
    words: Mapping[str, Any]
    peek: Callable[[Stored], bytes | None]


class Weight(NamedTuple):
    """What a packed tensor stands for. shape: None where only the number of elements is known.

    bits: of one packed element. turned: shape is (out, in), even where the plain layout stores (in, out).
    """

    kind: str
    shape: Shape | None
    elements: int
    bits: int
    turned: bool = True


class Container(NamedTuple):
    """mark: the suffix that shows it. main: that of the packed tensor; logical: that of the weight's own name.

    dtypes: of the packed tensor, for marks that others share. beside: suffixes of the bookkeeping.
    """

    mark: str
    main: str
    logical: str
    beside: tuple[str, ...]
    read: Callable[[Packed], Weight]
    dtypes: tuple[str, ...] = ()


def _weight(kind: str, shape: Shape, bits: int, *, turned: bool = True) -> Weight:
    return Weight(kind, shape, prod(shape), bits, turned)


def _exact(a: int, b: int, what: str) -> int:
    """a / b, which must be whole."""
    if b <= 0 or a % b or a <= 0:
        raise Unread(f"{what}: {a:,} / {b:,} is no whole number")
    return a // b


def _matrix(t: Stored | None, what: str) -> Shape:
    if t is None or len(t.shape) != 2:
        raise Unread(f"{what} is missing" if t is None else f"{what} has the shape {list(t.shape)}, not two axes")
    return t.shape


def _int32(p: Packed) -> Shape:
    if p.main.dtype not in _INT32:
        raise Unread(f"packed in {p.main.dtype}, not in int32")
    return _matrix(p.main, "the packed tensor")


def _said_bits(words: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = words.get(key)
        if type(value) is int and 0 < value <= 16:
            return value
    return None


def bnb4(p: Packed) -> Weight:
    """bitsandbytes NF4 or FP4: two weights in a byte, their shape in a JSON tensor beside."""
    mark = next(m for m in BNB4 if m in p.beside)
    held, data = p.main.nbytes * 2, p.peek(p.beside[mark])
    kind = "bitsandbytes-4bit"
    if data is None:  # by header alone: a column of bytes
        return Weight(kind, None, held, 4)
    try:
        state = parse_json(data, p.stem)
    except InputRefused as e:
        raise Unread(f"its quant_state is no JSON: {e.message}") from None
    shape = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(shape, list) or not shape or not all(type(n) is int and 0 < n < 1 << 40 for n in shape):
        raise Unread("its quant_state names no shape")
    if -(-prod(shape) // 2) != p.main.nbytes:
        raise Unread(f"its quant_state says {shape}, which takes {-(-prod(shape) // 2):,} bytes, not {p.main.nbytes:,}")
    return _weight(kind, tuple(shape), 4)


def bnb8(p: Packed) -> Weight:
    """bitsandbytes LLM.int8(): the weight as it is, a scale for each row."""
    out, _ = _matrix(p.main, "the weight")
    if p.beside[".SCB"].elements != out:
        raise Unread(f"SCB has {p.beside['.SCB'].elements:,} scales for {out:,} rows")
    return _weight("bitsandbytes-8bit", p.main.shape, 8)


def qweight(p: Packed) -> Weight:
    """GPTQ packs along the rows (in), AWQ along the columns (out): the scales, one for each output, show which."""
    rows, cols = _int32(p)
    groups, out = _matrix(p.beside.get(".scales"), "scales")
    if p.words.get("version") == "gemv":
        return _gemv(p, rows, cols)
    zeros, index = p.beside.get(".qzeros"), p.beside.get(".g_idx")
    if cols == out:
        bits = _gptq_bits(p, rows, groups, out, zeros, index)
        return _weight("gptq", (out, _exact(32 * rows, bits, "rows")), bits)
    bits = _exact(32 * cols, out, "bits of a weight")
    if bits not in (2, 4, 8) or rows % groups or (zeros is not None and zeros.shape != (groups, cols)):
        raise Unread(f"qweight {list(p.main.shape)} and scales {[groups, out]} fit neither GPTQ nor AWQ")
    return _weight("awq", (out, rows), bits)


def _gptq_bits(p: Packed, rows: int, groups: int, out: int, zeros: Stored | None, index: Stored | None) -> int:
    """Bits of a weight by what stands beside it; by the config only where that is all there is."""
    told = set()
    if index is not None:
        told.add(_exact(32 * rows, index.elements, "bits by g_idx"))
    if zeros is not None and len(zeros.shape) == 2 and zeros.shape[0] == groups and not 32 * zeros.shape[1] % out:
        told.add(32 * zeros.shape[1] // out)
    said = _said_bits(p.words, "bits", "w_bit")
    if not told and said is not None:
        told.add(said)
        size = p.words.get("group_size")
        if type(size) is int and size > 0 and groups * size * said != 32 * rows:
            raise Unread(f"{groups:,} groups of {size} are not the {32 * rows // said:,} inputs of {said} bits")
    if len(told) != 1 or not told <= {2, 3, 4, 8}:
        raise Unread(f"the bits of a weight are not told{f': {sorted(told)}' if told else ''}")
    return told.pop()


def _gemv(p: Packed, rows: int, cols: int) -> Weight:
    """AWQ's other layout: (out, in/8), the scales padded."""
    scales = p.beside[".scales"].shape
    if _said_bits(p.words, "bits", "w_bit") != 4 or scales[0] != rows:
        raise Unread(f"qweight {[rows, cols]} and scales {list(scales)} are not AWQ's gemv layout of 4 bits")
    return _weight("awq", (rows, 8 * cols), 4)


def weight_packed(p: Packed) -> Weight:
    """compressed-tensors: int32 rows padded to whole words, so that only weight_shape knows where they end."""
    if p.main.dtype == "U8":
        return _fp4(p, p.beside.get(".weight_scale"))
    out, cols = _int32(p)
    groups = _groups(p.words)
    bits = {b for b, _ in groups}
    if ".weight_shape" not in p.beside or (data := p.peek(p.beside[".weight_shape"])) is None:
        return _by_groups(p, out, cols, groups)
    wide = {"I64": 8, "I32": 4}.get(p.beside[".weight_shape"].dtype, 0)
    if not wide or len(data) != 2 * wide:
        raise Unread("weight_shape is not two integers")
    shape = tuple(int.from_bytes(data[i : i + wide], "little", signed=True) for i in (0, wide))
    found = {b for b in bits or range(1, 9) if cols in (-(-shape[1] // (32 // b)), -(-shape[1] * b // 32))}
    if shape[0] != out or shape[1] <= 0 or not found:
        raise Unread(f"weight_shape says {list(shape)}, weight_packed has {[out, cols]} int32")
    return _weight("pack-quantized", shape, max(found))


def _by_groups(p: Packed, out: int, cols: int, groups: set[tuple[int, int | None]]) -> Weight:
    """The inputs without weight_shape's data: groups x group size, where the config knows one of each."""
    if len(groups) != 1:
        raise Unread("its data hold the shape, and the config does not name one number of bits")
    ((bits, size),) = groups
    scale = _matrix(p.beside.get(".weight_scale"), "weight_scale")
    inputs = scale[1] * size if size else 0
    if scale[0] != out or cols not in (-(-inputs // (32 // bits)), -(-inputs * bits // 32)):
        raise Unread("its data hold the shape, and the groups do not tell it")
    return _weight("pack-quantized", (out, inputs), bits)


def _groups(words: Mapping[str, Any]) -> set[tuple[int, int | None]]:
    """(bits, group size) of every scheme that the config names."""
    out: set[tuple[int, int | None]] = set()
    groups = words.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        args = group.get("weights") if isinstance(group, dict) else None
        if isinstance(args, dict) and (bits := _said_bits(args, "num_bits") or 9) <= 8:
            size = args.get("group_size")
            out.add((bits, size if type(size) is int and size > 0 else None))
    return out


def scaled(p: Packed) -> Weight:
    """fp8 and int8 keep the weight's own shape; a byte tensor with block scales holds two fp4 weights in a byte."""
    scale = p.beside.get("_scale_inv") or p.beside.get("_scale")
    if p.main.dtype == "U8":
        return _fp4(p, scale)
    if p.main.dtype == "I8":
        if scale is None or not scale.dtype.startswith(("F16", "BF16", "F32", "F64")):
            raise Unread("int8 with scales that are no floats: perhaps two weights in a byte")
        return _weight("int8", p.main.shape, 8, turned=False)
    return _weight("fp8", p.main.shape, 8, turned=False)


def _fp4(p: Packed, scale: Stored | None) -> Weight:
    """Two weights in a byte along the last axis, one scale for each 16 (NVFP4) or 32 (MXFP4) of them."""
    shape = p.main.shape
    if scale is None or len(shape) < 2 or scale.shape[:-1] != shape[:-1]:
        raise Unread("a byte tensor whose scales do not stand in the same rows")
    block = _exact(2 * shape[-1], scale.shape[-1], "weights for each scale")
    if block not in (16, 32):
        raise Unread(f"one scale for {block:,} weights; NVFP4 has one for 16, MXFP4 for 32")
    return _weight("nvfp4" if block == 16 else "mxfp4", (*shape[:-1], 2 * shape[-1]), 4)


def blocks(p: Packed) -> Weight:
    """gpt-oss MXFP4: 16 bytes of two weights for each scale, rows of blocks."""
    shape, scale = p.main.shape, p.beside["_scales"].shape
    if len(shape) < 3 or scale != shape[:-1] or shape[-1] != 16 or p.main.dtype != "U8":
        raise Unread(f"blocks {list(shape)} and scales {list(scale)} are not MXFP4")
    return _weight("mxfp4", (*shape[:-2], shape[-2] * 32), 4)


def mlx(p: Packed) -> Weight:
    """MLX: bits and group size stand in the config, for all or by module; only their product shows in the shapes."""
    own = p.words.get(p.stem)
    words = own if isinstance(own, dict) else p.words
    bits, size = _said_bits(words, "bits"), words.get("group_size")
    if bits is None or type(size) is not int or size <= 0:
        raise Unread("the config names no bits and group_size")
    shape, scale = p.main.shape, p.beside[".scales"].shape
    if not shape or shape[:-1] != scale[:-1] or 32 * shape[-1] != bits * size * scale[-1]:
        raise Unread(f"{bits} bits in groups of {size} do not fit {list(shape)} and scales {list(scale)}")
    return _weight("mlx", (*shape[:-1], scale[-1] * size), bits, turned=False)


BNB4 = tuple(f".quant_state.bitsandbytes__{x}" for x in ("nf4", "fp4"))
_BNB4 = (*BNB4, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALES = ("_scale", "_scale_inv", "_scale_2", "_zero_point", "_global_scale", "_input_scale", "_activation_scale")
_PACKED = tuple(f".weight{x}" for x in ("_scale", "_zero_point", "_shape", "_g_idx", "_global_scale"))
CONTAINERS = (
    *(Container(mark, "", "", _BNB4, bnb4) for mark in BNB4),
    Container(".SCB", ".weight", ".weight", (".SCB", ".weight_format"), bnb8, ("I8",)),
    Container(".qweight", ".qweight", ".weight", (".scales", ".qzeros", ".g_idx"), qweight),
    Container(".weight_packed", ".weight_packed", ".weight", _PACKED, weight_packed),
    Container("_scales", "_blocks", "", ("_scales",), blocks),
    Container(".scales", ".weight", ".weight", (".scales", ".biases", ".qbiases"), mlx, ("U32",)),
    *(Container(mark, "", "", _SCALES, scaled, ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8"))
      for mark in ("_scale_inv", "_scale")),
)
# Beside any quantised module: how its inputs, outputs and cache are scaled.
ACTIVATIONS = tuple(f".{x}" for x in (
    "input_scale", "input_scale_ub", "input_zero_point", "input_global_scale", "activation_scale", "pre_quant_scale",
    "output_scale", "output_zero_point", "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"))
# Suffixes of containers that are not read here.
FOREIGN = {
    ".codebooks": "AQLM", ".W_q": "HQQ", ".q_weight": "EXL2", ".trellis": "EXL3", ".centroids": "VPTQ",
    ".Qidxs": "QuIP#", ".weight._data": "Quanto", ".weight_qdata": "torchao", ".bitmask": "sparse compressed-tensors",
    ".weight_scales": "EETQ"}
