"""Quantised containers as the weights that they hold: each by its format's own layout rules, and each broken once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import pytest

from llamactl.checkpoint.gguf import GGML_TYPES
from llamactl.checkpoint.logical import Unpacked, unpack

BITS = {"U8": 8, "I8": 8, "I32": 32, "U32": 32, "I64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E8M0": 8}
OUT, IN = 96, 256


class T(NamedTuple):
    """A tensor by header, and its data where a test gives them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes | None = None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return len(self.data) if self.data is not None else self.elements * BITS[self.dtype] // 8


def ts(tensors: Mapping[str, tuple[Any, ...]]) -> dict[str, T]:
    return {n: T(n, *t) for n, t in tensors.items()}


def read(tensors: Mapping[str, tuple[Any, ...]], words: Any = None, *, data: bool = True) -> Unpacked:
    made = ts(tensors)
    return unpack(made, words, peek=lambda t: made[t.name].data if data else None)


def only(tensors: Mapping[str, tuple[Any, ...]], words: Any = None, **kw: bool) -> Any:
    """The one weight of a container; all other tensors are its bookkeeping."""
    got = read(tensors, words, **kw)
    assert got.unread == {}
    (w,) = got.weights
    assert {w.stored, *got.bookkeeping} == set(tensors)
    assert w.nbytes == sum(t.nbytes for t in ts(tensors).values())
    return w


def state(shape: Any, kind: str = "nf4") -> tuple[str, tuple[int, ...], bytes]:
    text = json.dumps({"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": shape}).encode()
    return "U8", (len(text),), text


def gptq(bits: int, *, group: int = 64, zeros: bool = True, index: bool = True) -> dict[str, Any]:
    """AutoGPTQ's QuantLinear: qweight (in / 32 x bits, out), qzeros (groups, out / 32 x bits), g_idx (in)."""
    out: dict[str, Any] = {"m.qweight": ("I32", (IN // 32 * bits, OUT)), "m.scales": ("F16", (IN // group, OUT))}
    if zeros:
        out["m.qzeros"] = ("I32", (IN // group, OUT // 32 * bits))
    if index:
        out["m.g_idx"] = ("I32", (IN,))
    return out


# ---- bitsandbytes


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_4_bit(kind: str, nested: bool) -> None:
    n = OUT * IN
    tensors: dict[str, Any] = {
        "m.weight": ("U8", (n // 2, 1)), "m.weight.absmax": ("U8" if nested else "F32", (n // 64,)),
        "m.weight.quant_map": ("F32", (16,)), f"m.weight.quant_state.bitsandbytes__{kind}": state([OUT, IN], kind)}
    if nested:
        tensors |= {"m.weight.nested_absmax": ("F32", (n // 64 // 256,)), "m.weight.nested_quant_map": ("F32", (256,))}
    w = only(tensors)
    assert (w.name, w.shape, w.elements, w.container, w.bits) == ("m.weight", (OUT, IN), n, "bitsandbytes-4bit", 4)
    header_alone = only(tensors, data=False)
    assert (header_alone.shape, header_alone.elements) == (None, n)


def test_bitsandbytes_4_bit_in_another_storage_dtype() -> None:
    """bnb_4bit_quant_storage=bfloat16: four weights in each stored element."""
    w = only({"m.weight": ("BF16", (OUT * IN // 4, 1)), "m.weight.absmax": ("F32", (OUT * IN // 64,)),
              "m.weight.quant_state.bitsandbytes__nf4": state([OUT, IN])})
    assert w.shape == (OUT, IN)


@pytest.mark.parametrize(("said", "why"), [
    (state([OUT, IN + 2]), "takes 12,384 bytes, not 12,288"), (state([OUT]), "takes 48 bytes"), (state([]), "no shape"),
    (state([OUT, -IN]), "no shape"), (state([True, IN]), "no shape"), (state("x"), "no shape"),
    (("U8", (9,), b"not json!"), "no JSON"), (("U8", (4,), bytes(4)), "no JSON"), (("U8", (2,), b"[]"), "no shape"),
])
def test_a_quant_state_that_does_not_fit_is_not_believed(said: Any, why: str) -> None:
    got = read({"m.weight": ("U8", (OUT * IN // 2, 1)), "m.weight.absmax": ("F32", (OUT * IN // 64,)),
                "m.weight.quant_state.bitsandbytes__nf4": said, "n.weight": ("BF16", (3,))})
    assert why in got.unread["m.weight"]
    assert [w.name for w in got.weights] == ["n.weight"]
    assert set(got.bookkeeping) == {"m.weight.absmax", "m.weight.quant_state.bitsandbytes__nf4"}


def test_bitsandbytes_8_bit() -> None:
    w = only({"m.weight": ("I8", (OUT, IN)), "m.SCB": ("F32", (OUT,)), "m.weight_format": ("U8", ())})
    assert (w.name, w.shape, w.container, w.bits) == ("m.weight", (OUT, IN), "bitsandbytes-8bit", 8)
    assert "m.weight" in read({"m.weight": ("I8", (OUT, IN)), "m.SCB": ("F32", (OUT + 1,))}).unread


# ---- GPTQ, AWQ


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("zeros", "index"), [(True, True), (True, False), (False, True)])
def test_gptq_by_header(bits: int, zeros: bool, index: bool) -> None:
    w = only(gptq(bits, zeros=zeros, index=index))
    assert (w.name, w.shape, w.container, w.bits) == ("m.weight", (OUT, IN), "gptq", bits)


def test_gptq_by_the_config_where_nothing_stands_beside() -> None:
    tensors = gptq(4, zeros=False, index=False)
    assert only(tensors, {"bits": 4, "group_size": 64}).shape == (OUT, IN)
    assert only(tensors, {"bits": 4, "group_size": -1}).shape == (OUT, IN)
    for words in ({}, {"bits": 8, "group_size": 64}, {"bits": 5, "group_size": -1}, {"bits": "4"}):
        assert "m.qweight" in read(tensors, words).unread


@pytest.mark.parametrize("change", [
    {"m.qweight": ("I32", (IN // 8, OUT, 1))}, {"m.qweight": ("F16", (IN // 8, OUT))}, {"m.g_idx": ("I32", (IN + 32,))},
    {"m.qweight": ("I32", (IN // 16, 2 * OUT))}, {"m.scales": ("F16", (IN // 64, OUT, 1))}, {"m.g_idx": ("I32", (0,))},
], ids=["axes", "dtype", "inputs", "marlin", "scales", "none"])
def test_a_gptq_like_thing_is_not_read(change: dict[str, Any]) -> None:
    got = read({**gptq(4), **change}, {"bits": 4, "group_size": 64})
    assert list(got.unread) == ["m.qweight"]
    assert got.weights == ()


def test_awq_packs_the_columns() -> None:
    w = only({"m.qweight": ("I32", (IN, OUT // 8)), "m.qzeros": ("I32", (IN // 64, OUT // 8)),
              "m.scales": ("F16", (IN // 64, OUT))}, {"bits": 4, "version": "gemm"})
    assert (w.name, w.shape, w.container, w.bits) == ("m.weight", (OUT, IN), "awq", 4)


def test_a_square_awq_and_a_square_gptq_are_told_apart() -> None:
    n = 128
    awq = {"m.qweight": ("I32", (n, n // 8)), "m.qzeros": ("I32", (2, n // 8)), "m.scales": ("F16", (2, n))}
    gptq_ = {"m.qweight": ("I32", (n // 8, n)), "m.qzeros": ("I32", (2, n // 8)), "m.scales": ("F16", (2, n))}
    assert (only(awq).container, only(gptq_).container) == ("awq", "gptq")
    assert only(awq).shape == only(gptq_).shape == (n, n)


def test_awq_gemv() -> None:
    tensors = {"m.qweight": ("I32", (OUT, IN // 8)), "m.qzeros": ("I32", (OUT, 1)), "m.scales": ("F16", (OUT, 8))}
    assert only(tensors, {"bits": 4, "version": "gemv"}).shape == (OUT, IN)
    assert "m.qweight" in read(tensors, {"bits": 8, "version": "gemv"}).unread


# ---- compressed-tensors, fp8, fp4


def packed(bits: int, inputs: int = IN, group: int = 64) -> dict[str, Any]:
    """pack_to_int32: 32 // bits weights in a word, rows padded to whole words."""
    shape = OUT.to_bytes(8, "little") + inputs.to_bytes(8, "little")
    return {"m.weight_packed": ("I32", (OUT, -(-inputs // (32 // bits)))), "m.weight_shape": ("I64", (2,), shape),
            "m.weight_scale": ("BF16", (OUT, max(1, inputs // group)))}


def scheme(bits: int, group: int | None) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"weights": {"num_bits": bits, "group_size": group}}}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("inputs", [IN, IN - 3])
def test_packed_weights_end_where_weight_shape_says(bits: int, inputs: int) -> None:
    for words in (scheme(bits, None), None):
        w = only(packed(bits, inputs), words)
        assert (w.name, w.shape, w.container, w.bits) == ("m.weight", (OUT, inputs), "pack-quantized", bits)
    asymmetric = {**packed(bits, inputs), "m.weight_zero_point": ("I32", (OUT * bits // 32, 4)),
                  "m.weight_g_idx": ("I32", (inputs,))}
    assert only(asymmetric, scheme(bits, 64)).shape == (OUT, inputs)


def test_packed_weights_by_header_alone() -> None:
    assert only(packed(4), scheme(4, 64), data=False).shape == (OUT, IN)
    for words in (None, scheme(4, None), scheme(4, 32), scheme(8, 64)):
        assert "m.weight_packed" in read(packed(4), words, data=False).unread


@pytest.mark.parametrize("shape", [(OUT + 1, IN), (OUT, IN + 8), (OUT, 0), (OUT, -8)])
def test_a_weight_shape_that_does_not_fit_is_not_believed(shape: tuple[int, int]) -> None:
    data = b"".join(n.to_bytes(8, "little", signed=True) for n in shape)
    got = read({**packed(4), "m.weight_shape": ("I64", (2,), data)}, scheme(4, 64))
    assert "weight_shape says" in got.unread["m.weight_packed"]


@pytest.mark.parametrize(("dtype", "kind"), [("F8_E4M3", "fp8"), ("I8", "int8")])
@pytest.mark.parametrize("scale", [("m.weight_scale", (OUT, 1)), ("m.weight_scale_inv", (1, 2)),
                                   ("m.weight_scale", ())])
def test_scaled_weights_keep_their_shape(dtype: str, kind: str, scale: tuple[str, tuple[int, ...]]) -> None:
    got = read({"m.weight": (dtype, (OUT, IN)), scale[0]: ("F32", scale[1]), "m.input_scale": ("F32", ()),
                "m.k_scale": ("F32", ()), "m.bias": ("BF16", (OUT,))})
    assert [(w.name, w.shape, w.container) for w in got.weights] == [("m.weight", (OUT, IN), kind),
                                                                    ("m.bias", (OUT,), None)]
    assert set(got.bookkeeping) == {scale[0], "m.input_scale", "m.k_scale"}


def test_batched_experts_in_fp8() -> None:
    w = only({"e.gate_up_proj": ("F8_E4M3", (4, OUT, IN)), "e.gate_up_proj_scale_inv": ("F32", (4, 1, 2))})
    assert (w.name, w.shape) == ("e.gate_up_proj", (4, OUT, IN))


def test_fp8_without_scales_is_a_plain_tensor() -> None:
    assert only({"m.weight": ("F8_E4M3", (OUT, IN))}).container is None


@pytest.mark.parametrize(("block", "kind"), [(16, "nvfp4"), (32, "mxfp4")])
@pytest.mark.parametrize("name", ["m.weight", "m.weight_packed"])
def test_two_fp4_weights_in_a_byte(block: int, kind: str, name: str) -> None:
    globals_ = ("m.weight_scale_2",) if name == "m.weight" else ("m.weight_global_scale",)
    w = only({name: ("U8", (OUT, IN // 2)), "m.weight_scale": ("F8_E4M3", (OUT, IN // block)),
              **{g: ("F32", (1,)) for g in globals_}})
    assert (w.name, w.shape, w.container, w.bits) == ("m.weight", (OUT, IN), kind, 4)


@pytest.mark.parametrize("scale", [(OUT, IN // 64), (OUT // 2, IN // 16), (), (1,), (OUT, 7)])
def test_bytes_with_other_scales_are_not_read(scale: tuple[int, ...]) -> None:
    """BitNet packs four weights in a byte beside one scale, others along the rows."""
    assert "m.weight" in read({"m.weight": ("U8", (OUT, IN // 2)), "m.weight_scale": ("BF16", scale)}).unread


def test_gpt_oss_blocks() -> None:
    w = only({"e.gate_up_proj_blocks": ("U8", (4, OUT, IN // 32, 16)),
              "e.gate_up_proj_scales": ("U8", (4, OUT, IN // 32))})
    assert (w.name, w.shape, w.container, w.bits, w.turned) == ("e.gate_up_proj", (4, OUT, IN), "mxfp4", 4, True)
    for blocks, scales in (((4, OUT, 8, 8), (4, OUT, 8)), ((4, OUT, 8, 16), (4, OUT, 9)), ((8, 16), (8,))):
        assert read({"x_blocks": ("U8", blocks), "x_scales": ("U8", scales)}).unread


# ---- MLX


def test_mlx() -> None:
    tensors = {"m.weight": ("U32", (OUT, IN * 4 // 32)), "m.scales": ("F16", (OUT, IN // 64)),
               "m.biases": ("F16", (OUT, IN // 64))}
    w = only(tensors, {"group_size": 64, "bits": 4})
    assert (w.name, w.shape, w.container, w.bits) == ("m.weight", (OUT, IN), "mlx", 4)
    other = {"group_size": 32, "bits": 3, "m": {"group_size": 64, "bits": 4}}
    assert only(tensors, other).shape == (OUT, IN)
    for words in (None, {"bits": 4}, {"group_size": 32, "bits": 4}, {"group_size": 0, "bits": 4}):
        assert "m.weight" in read(tensors, words).unread
    # 8 bits in groups of 32 have the same shapes: only the config tells them apart
    assert only(tensors, {"group_size": 32, "bits": 8}).shape == (OUT, IN // 2)


def test_mlx_experts_without_biases() -> None:
    w = only({"m.weight": ("U32", (8, OUT, IN // 8)), "m.scales": ("U8", (8, OUT, IN // 32))},
             {"group_size": 32, "bits": 4, "mode": "mxfp4"})
    assert w.shape == (8, OUT, IN)


# ---- everything else


@pytest.mark.parametrize(("suffix", "kind"), [("codebooks", "AQLM"), ("W_q", "HQQ"), ("q_weight", "EXL2"),
                                              ("trellis", "EXL3"), ("weight._data", "Quanto")])
def test_foreign_containers_are_named_and_not_read(suffix: str, kind: str) -> None:
    got = read({f"m.{suffix}": ("I32", (4, 4)), "n.weight": ("BF16", (3,))})
    assert kind in got.unread[f"m.{suffix}"]
    assert [w.name for w in got.weights] == ["n.weight"]


def test_plain_tensors_stay_as_they_are() -> None:
    tensors = {"embed.weight": ("BF16", (7, 3)), "x.scale": ("F32", (1,)), "k_scale": ("F32", (1,)),
               "attn.k_scale": ("F32", (8,)), "scalar": ("F32", ())}
    got = read(tensors)
    assert [(w.name, w.shape, w.container, w.stored) for w in got.weights] == [
        (n, t[1], None, n) for n, t in tensors.items()]
    assert not got.bookkeeping
    assert not got.unread


def test_a_mixed_file_is_sorted_tensor_by_tensor() -> None:
    other = {n.replace("m.", "n."): t for n, t in packed(4).items()}
    got = read({**gptq(4), **other, "lm_head.weight": ("F16", (5, 2))})
    assert {w.name: w.container for w in got.weights} == {"m.weight": "gptq", "n.weight": "pack-quantized",
                                                          "lm_head.weight": None}


def test_ggml_blocks_hold_what_their_names_say() -> None:
    """Every GGUF type: elements stand in the header, the block says their bytes."""
    assert {t.name: 8 * t.block_bytes / t.block for t in GGML_TYPES.values() if t.name in ("Q4_0", "Q8_0", "Q6_K")} == {
        "Q4_0": 4.5, "Q8_0": 8.5, "Q6_K": 6.5625}
