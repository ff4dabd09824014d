"""The options of `llamactl convert`: what each does to values, names, files and configs, by arithmetic of our own."""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

made: Any = sys.modules["llamactl_tests_checkpoints"]  # loaded by conftest.py

MANIFEST = "llamactl-manifest.json"
UP = "model.layers.1.mlp.up_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BITS = {"BF16": 7, "F16": 10, "F32": 23}  # of the fraction
LARGEST = {"BF16": 127, "F16": 15, "F32": 127}  # the largest exponent


@pytest.fixture
def convert(cli: Any, tmp_path: Path) -> Any:
    """convert(source, *flags): into a new folder; (the JSON answer, the folder)."""
    count = iter(range(100))

    def call(source: Path, *flags: str) -> tuple[Any, Path]:
        out = tmp_path / f"out{next(count)}"
        got = cli("convert", source, out, *flags, "--json")
        assert got.code == 0, got.err
        return got.json(), out

    return call


def refused(cli: Any, source: Path, *flags: str, code: int, word: str) -> str:
    """The one line of a refusal; nothing is written."""
    before = sorted(os.listdir(source.parent))
    got = cli("convert", source, source.parent / "refused", *flags)
    assert (got.code, got.out) == (code, "")
    assert got.err.startswith(f"error[{word}]: ")
    assert sorted(os.listdir(source.parent)) == before
    return str(got.err)


def warned(body: Any) -> dict[str, str]:
    return {w["code"]: w["message"] for w in body["warnings"]}


def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return found


def rounded(x: Fraction, dtype: str) -> float:
    """The value of `dtype` that is nearest to x, halves to even; by exact arithmetic."""
    if not x:
        return 0.0
    exponent = math.frexp(float(abs(x)))[1] - 1
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    least = 1 - LARGEST[dtype]
    step = Fraction(2) ** (max(exponent, least) - BITS[dtype])
    value = round(x / step) * step  # Python rounds halves to even
    return math.copysign(math.inf, x) if abs(value) >= Fraction(2) ** (LARGEST[dtype] + 1) else float(value)


def test_the_rounding_here_is_right() -> None:
    """Against struct, which has fp32 and fp16."""
    for x in (1.0, 1 + 2**-11, 1 + 3 * 2**-11, 65504.0, 65519.0, 2**-24, 2**-25, 3 * 2**-26, 6.1e-5, 0.1, -1 / 3):
        assert rounded(Fraction(x), "F16") == struct.unpack("<e", struct.pack("<e", x))[0]
        assert rounded(Fraction(x), "F32") == struct.unpack("<f", struct.pack("<f", x))[0]
    assert rounded(Fraction(65520), "F16") == math.inf
    assert rounded(Fraction(1 + 2**-8), "BF16") == 1
    assert rounded(Fraction(1 + 2**-8 + 2**-30), "BF16") == 1 + 2**-7


# ---- types


@pytest.mark.parametrize(("source", "target"), [("BF16", "F32"), ("F16", "F32"), ("F32", "BF16"), ("F32", "F16"),
                                                ("BF16", "F16"), ("F16", "BF16")])
def test_a_cast_rounds_each_value_once(convert: Any, tmp_path: Path, source: str, target: str) -> None:
    before = made.llama(tmp_path / "m", source)
    body, out = convert(tmp_path / "m", "--dtype", {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}[target])
    after = made.read(out)
    assert after.keys() == before.keys()
    for name, t in after.items():
        assert (t.dtype, t.shape) == (target, before[name].shape)
        some = slice(None, 300) if name != UP else slice(None)  # exact arithmetic is slow
        assert t.floats[some] == [rounded(Fraction(x), target) for x in before[name].floats[some]]
    assert config(out) == {**config(tmp_path / "m"), "torch_dtype": made.WORDS[target]}
    assert warned(body).keys() <= {"convert-values"}
    proof = body["result"]["proof"]
    assert (proof["exact"], proof["cast"]) == ((21, 0) if target == "F32" else (0, 21))
    if target == "F32":  # and back again it is the same
        word = {"BF16": "bf16", "F16": "fp16"}[source]
        assert made.read(convert(out, "--dtype", word)[1]) == before


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "BF16"])
def test_every_name_of_a_type(convert: Any, tmp_path: Path, word: str) -> None:
    made.llama(tmp_path / "m", "F32")
    _, out = convert(tmp_path / "m", "--dtype", word, "--dry-run")
    assert not out.exists()


def test_without_a_type_every_bit_stays(convert: Any, tmp_path: Path) -> None:
    """Norms in fp32 beside bf16; a NaN with a payload, infinities, a negative zero."""
    odd = struct.pack("<8H", 0x7FA5, 0xFFC1, 0x7F80, 0xFF80, 0x8000, 0x0001, 0x7F7F, 0x3F80) * 768
    change = {UP: made.Tensor("BF16", (96, 64), odd), "model.norm.weight": made.noise("F32", (64,), "norm")}
    before = made.llama(tmp_path / "m", change=change)
    for flags in ((), ("--to", "lesson"), ("--shard-size", "50kB")):
        body, out = convert(tmp_path / "m", "--no-proof", *flags)
        after = made.read(out)
        assert sorted(after.values()) == sorted(before.values()) or flags == ("--to", "lesson")
        up = "blocks.1.ff.w2.weight" if flags == ("--to", "lesson") else UP
        assert after[up] == before[UP]
        assert body["warnings"] == []
    assert config(convert(tmp_path / "m", "--no-proof")[1]) == config(tmp_path / "m")


def test_values_that_are_no_numbers_do_not_stop_the_proof(convert: Any, tmp_path: Path) -> None:
    change = {UP: made.Tensor("BF16", (96, 64), struct.pack("<H", 0x7FC0) * 96 * 64)}
    before = made.llama(tmp_path / "m", change=change)
    body, out = convert(tmp_path / "m")
    assert made.read(out) == before
    assert "finite" in body["result"]["proof"]["logits_not_run"]


def _with(tmp_path: Path, dtype: str, *values: float) -> dict[str, Any]:
    """A model whose UP begins with `values`."""
    t = made.noise(dtype, (96, 64), UP)
    data = made.pack(dtype, values) + t.data[len(values) * made.SIZES[dtype] :]
    found: dict[str, Any] = made.llama(tmp_path / "m", dtype, change={UP: made.Tensor(dtype, (96, 64), data)})
    return found


@pytest.mark.parametrize(("source", "value", "shown"), [("BF16", 1e30, "1e+30"), ("BF16", -65536.0, "65,536"),
                                                        ("F32", 65520.0, "65,520"), ("F32", -1e10, "1e+10")])
def test_a_value_that_fp16_does_not_hold_is_refused_by_name(cli: Any, tmp_path: Path, source: str, value: float,
                                                            shown: str) -> None:
    _with(tmp_path, source, value)
    for flags in ((), ("--dry-run",), ("--no-proof",), ("--to", "lesson"), ("--to", "meta"), ("--to", "gguf")):
        said = refused(cli, tmp_path / "m", "--dtype", "fp16", *flags, code=3, word="convert-overflow")
        assert shown in said or source == "BF16"
        assert "65,504" in said
        assert "--allow-overflow" in said
        assert UP in said or flags[:1] == ("--to",)


def test_fp32_beyond_bf16_is_refused_too(cli: Any, tmp_path: Path) -> None:
    _with(tmp_path, "F32", 3.4e38)
    assert UP in refused(cli, tmp_path / "m", "--dtype", "bf16", code=3, word="convert-overflow")


def test_the_last_values_that_fit(convert: Any, tmp_path: Path) -> None:
    _with(tmp_path, "F32", 65504.0, -65519.0, 2.0**-24, 2.0**-25 * 1.01, math.inf, -math.inf)
    body, out = convert(tmp_path / "m", "--dtype", "fp16", "--no-proof")
    assert made.read(out)[UP].floats[:6] == [65504.0, -65504.0, 2.0**-24, 2.0**-24, math.inf, -math.inf]
    assert body["warnings"] == []


def test_what_is_clamped_and_what_is_lost_is_counted(convert: Any, tmp_path: Path) -> None:
    before = _with(tmp_path, "BF16", 1e30, -1e30, 65536.0, 2.0**-30, -(2.0**-26), math.inf, -math.inf, math.nan, 0.0)
    body, out = convert(tmp_path / "m", "--dtype", "fp16", "--allow-overflow", "--no-proof")
    values = made.read(out)[UP].floats
    assert values[:7] == [65504.0, -65504.0, 65504.0, 0.0, 0.0, math.inf, -math.inf]
    assert math.isnan(values[7])
    assert values[8:] == [rounded(Fraction(x), "F16") for x in before[UP].floats[8:]]
    said = [w["message"] for w in body["warnings"] if w["code"] == "convert-values"]
    assert len(said) == 2
    assert f"3 values clamped to the largest value of the type, in {UP}" in said[0]
    assert re.search(rf"^2 values rounded to zero, in {re.escape(UP)}", said[1])
    assert manifest(out)["values"] == {"clamped": {UP: 3}, "flushed_to_zero": {UP: 2}}
    again, _ = convert(tmp_path / "m", "--dtype", "fp32", "--no-proof")
    assert again["warnings"] == []


def test_allow_overflow_alone_changes_nothing(convert: Any, tmp_path: Path) -> None:
    before = made.llama(tmp_path / "m")
    body, out = convert(tmp_path / "m", "--allow-overflow", "--no-proof")
    assert (made.read(out), body["warnings"]) == (before, [])


# ---- shards


@pytest.mark.parametrize("layout", ["hf", "lesson"])
@pytest.mark.parametrize(("size", "limit"), [("50kB", 50_000), ("20KiB", 20_480), ("1B", 1), ("14336B", 14_336)])
def test_shards_and_their_index(convert: Any, tmp_path: Path, size: str, limit: int, layout: str) -> None:
    made.llama(tmp_path / "m")
    body, out = convert(tmp_path / "m", "--to", layout, "--shard-size", size, "--no-proof")
    files = sorted(out.glob("*.safetensors"))
    assert [f.name for f in files] == [f"model-{n:05d}-of-{len(files):05d}.safetensors"
                                       for n in range(1, len(files) + 1)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    at, total = {}, 0
    for f in files:
        tensors = made.read(f)
        sizes = [len(t.data) for t in tensors.values()]
        assert sum(sizes) <= limit or len(sizes) == 1
        at |= dict.fromkeys(tensors, f.name)
        total += sum(sizes)
    assert index == {"metadata": {"total_size": total}, "weight_map": at}
    assert total == 2 * 72000
    assert {t["name"]: t["file"] for t in body["result"]["tensors"]} == at
    whole, single = convert(out, "--to", layout, "--no-proof")
    assert made.read(single) == made.read(out)
    assert sorted(os.listdir(single)) == ["config.json", MANIFEST, "model.safetensors"]
    assert whole["warnings"] == []


def test_one_shard_is_a_single_file(convert: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "m")
    for size in ("144000B", "5GB"):
        _, out = convert(tmp_path / "m", "--shard-size", size, "--no-proof")
        assert sorted(os.listdir(out)) == ["config.json", MANIFEST, "model.safetensors"]


def test_every_tensor_begins_at_a_multiple_of_its_element(convert: Any, tmp_path: Path) -> None:
    change = {f"model.layers.{n}.input_layernorm.weight": made.noise("F32", (51,), "norm") for n in (0, 1)}
    made.llama(tmp_path / "m", change=change, hidden_size=51, num_attention_heads=3, num_key_value_heads=1,
               head_dim=18)
    _, out = convert(tmp_path / "m", "--no-proof")
    with (out / "model.safetensors").open("rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
    head = made.header(out / "model.safetensors")
    assert start % 8 == 0
    for name, e in head.items():
        assert name == "__metadata__" or (start + e["data_offsets"][0]) % made.SIZES[e["dtype"]] == 0


# ---- KV heads


def kv(t: Any, dim: int = 8) -> list[list[list[float]]]:
    """A projection's rows by head."""
    width = t.shape[1]
    rows = [t.floats[n : n + width] for n in range(0, len(t.floats), width)]
    return [rows[n : n + dim] for n in range(0, len(rows), dim)]


def projections(tensors: dict[str, Any]) -> Iterator[str]:
    return (n for n in tensors if re.search(r"\.[kv]_proj\.", n))


@pytest.mark.parametrize("n", [4, 8])
def test_more_kv_heads_are_copies_and_exact(convert: Any, tmp_path: Path, n: int) -> None:
    before = made.llama(tmp_path / "m")
    body, out = convert(tmp_path / "m", "--kv-heads", str(n))
    after = made.read(out)
    for name in before:
        if name in set(projections(before)):
            old, new = kv(before[name]), kv(after[name])
            assert len(new) == n
            assert new == [old[h // (n // 2)] for h in range(n)]
        else:
            assert after[name] == before[name]
    assert config(out) == {**config(tmp_path / "m"), "num_key_value_heads": n}
    assert body["result"]["parameters"] == 72000 + 2 * 2 * (n - 2) * 8 * 64
    assert body["result"]["parameters"] == sum(math.prod(t.shape) for t in after.values())
    assert body["result"]["proof"]["logits"]["max_abs_dlogit"] <= 1e-6
    assert body["warnings"] == []
    _, back = convert(out, "--kv-heads", "2")  # the mean of equal heads is that head
    assert made.read(back) == before


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
@pytest.mark.parametrize("n", [1, 2])
def test_fewer_kv_heads_are_means_rounded_once(convert: Any, tmp_path: Path, n: int, dtype: str) -> None:
    before = made.llama(tmp_path / "m", dtype, num_key_value_heads=8)
    body, out = convert(tmp_path / "m", "--kv-heads", str(n))
    after = made.read(out)
    each = 8 // n
    for name in before:
        if name not in set(projections(before)):
            assert after[name] == before[name]
            continue
        old, new = kv(before[name]), kv(after[name])
        assert len(new) == n
        for h in range(n):
            for r in range(0, 8, 3):
                mean = [sum(map(Fraction, c), Fraction(0)) / each for c in zip(
                    *(old[h * each + j][r] for j in range(each)), strict=True)]
                assert new[h][r] == [rounded(x, dtype) for x in mean]
    assert config(out)["num_key_value_heads"] == n
    assert body["result"]["parameters"] == sum(math.prod(t.shape) for t in after.values())
    assert "--text FILE measures by how much" in warned(body)["kv-heads-pooled"]
    assert body["result"]["proof"]["changed"] == 4
    assert body["result"]["proof"]["logits"]["max_abs_dlogit"] > 1e-6


def test_a_mean_is_not_rounded_on_its_way(convert: Any, tmp_path: Path) -> None:
    """(4 + 2^-6 + 2^-28 + 0) / 4 lies just above half way between two neighbours of bf16, where fp32 falls onto it."""
    name = "model.layers.0.self_attn.k_proj.weight"
    t = made.noise("BF16", (32, 64), name)
    rows = t.rows
    for head, x in enumerate((4.0, 2.0**-6, 2.0**-28, 0.0)):
        rows[8 * head] = made.pack("BF16", [x] * 64)
    made.llama(tmp_path / "m", num_key_value_heads=4, change={name: made.Tensor("BF16", (32, 64), b"".join(rows))})
    _, out = convert(tmp_path / "m", "--kv-heads", "1", "--no-proof")
    assert made.read(out)[name].floats[:64] == [1 + 2.0**-7] * 64


def test_the_losses_of_a_text(cli: Any, convert: Any, tmp_path: Path, speaker: Any) -> None:
    made.llama(tmp_path / "m", "F32")
    words = json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127]))
    text = tmp_path / "t.txt"
    text.write_text("Pack my box with five dozen liquor jugs." * 3)
    said = refused(cli, tmp_path / "m", "--text", str(text), code=4, word="tokenizer-missing")
    assert "tokenizer" in said
    (tmp_path / "m" / "tokenizer.json").write_text(words)
    same = convert(tmp_path / "m", "--text", str(text))[0]["result"]["proof"]["logits"]
    assert same["loss_source"] == same["loss_output"]
    assert math.log(112) - 1 < same["loss_source"] < math.log(112) + 1
    pooled, _ = convert(tmp_path / "m", "--kv-heads", "1", "--text", str(text))
    losses = pooled["result"]["proof"]["logits"]
    assert losses["loss_source"] == same["loss_source"] != losses["loss_output"]
    plain = cli("convert", tmp_path / "m", tmp_path / "plain", "--kv-heads", "1", "--text", str(text)).out
    assert (f"loss on the text {losses['loss_source']:.4f} before, {losses['loss_output']:.4f} after" in plain)
    text.write_text("a")
    refused(cli, tmp_path / "m", "--text", str(text), code=3, word="text-short")
    refused(cli, tmp_path / "m", "--text", str(tmp_path / "none"), code=4, word="not-found")


# ---- tie


def test_an_equal_head_is_tied(convert: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "m", change={HEAD: made.noise("BF16", (112, 64), EMBED)})
    body, out = convert(tmp_path / "m", "--tie")
    assert HEAD not in made.read(out)
    assert config(out)["tie_word_embeddings"] is True
    assert body["result"]["ignored"] == [[HEAD, "equal to the token embedding, which is tied to it now"]]
    assert body["result"]["parameters"] == 72000 - 112 * 64
    assert body["result"]["proof"]["logits"]["max_abs_dlogit"] <= 1e-6
    kept, out = convert(tmp_path / "m")  # unasked it stays
    assert (made.read(out)[HEAD].data, kept["result"]["ignored"]) == (made.read(out)[EMBED].data, [])
    assert config(out) == config(tmp_path / "m")


def test_a_head_of_its_own_is_never_tied(cli: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "m")
    said = refused(cli, tmp_path / "m", "--tie", code=3, word="weights-head-differs")
    assert HEAD in said
    assert EMBED in said
    t = made.noise("BF16", (112, 64), EMBED)
    last = bytes([t.data[-1] ^ 0x80])
    made.llama(tmp_path / "n", change={HEAD: made.Tensor("BF16", t.shape, t.data[:-1] + last)})
    refused(cli, tmp_path / "n", "--tie", code=3, word="weights-head-differs")


def test_a_tied_head_is_written_out(convert: Any, tmp_path: Path) -> None:
    before = made.llama(tmp_path / "m", tie_word_embeddings=True)
    assert HEAD not in before
    body, out = convert(tmp_path / "m", "--untie")
    after = made.read(out)
    assert after[HEAD] == after[EMBED] == before[EMBED]
    assert config(out)["tie_word_embeddings"] is False
    assert body["result"]["parameters"] == 72000
    assert body["result"]["proof"]["logits"]["max_abs_dlogit"] <= 1e-6
    for flags in ((), ("--tie",)):
        _, out = convert(tmp_path / "m", *flags, "--no-proof")
        assert (made.read(out), config(out)) == (before, config(tmp_path / "m"))


def test_a_second_copy_of_a_tied_head(cli: Any, convert: Any, tmp_path: Path) -> None:
    equal = {HEAD: made.noise("BF16", (112, 64), EMBED)}
    before = made.llama(tmp_path / "m", tie_word_embeddings=True, change=equal)
    for flags in ((), ("--tie",)):
        body, out = convert(tmp_path / "m", *flags, "--no-proof")
        assert made.read(out) == {n: t for n, t in before.items() if n != HEAD}
        assert body["result"]["ignored"] == [[HEAD, "a second copy of the token embedding, equal to it"]]
    body, out = convert(tmp_path / "m", "--untie")
    assert made.read(out) == before
    assert config(out)["tie_word_embeddings"] is False


def test_a_head_beside_a_tied_embedding_that_differs_is_never_dropped(cli: Any, convert: Any, tmp_path: Path) -> None:
    before = made.llama(tmp_path / "m", tie_word_embeddings=True, change={HEAD: made.noise("BF16", (112, 64), "head")})
    for flags in ((), ("--tie",), ("--to", "meta"), ("--to", "gguf"), ("--dry-run",)):
        said = refused(cli, tmp_path / "m", *flags, code=3, word="weights-head-differs")
        assert HEAD in said
        assert "--untie" in said
    _, out = convert(tmp_path / "m", "--untie")
    assert made.read(out) == before
    assert config(out)["tie_word_embeddings"] is False


def test_a_gpt2_is_untied_too(convert: Any, tmp_path: Path) -> None:
    """Its config says nothing of it, and its family is tied: afterwards the config must say so."""
    before = made.gpt2(tmp_path / "m")
    _, out = convert(tmp_path / "m", "--untie")
    after = made.read(out)
    assert after[HEAD] == before["transformer.wte.weight"]
    assert config(out) == {**config(tmp_path / "m"), "tie_word_embeddings": False}


# ---- vocabulary


@pytest.mark.parametrize("tied", [False, True])
def test_padding_is_rows_of_zeros(convert: Any, tmp_path: Path, tied: bool) -> None:
    before = made.llama(tmp_path / "m", tie_word_embeddings=tied)
    body, out = convert(tmp_path / "m", "--vocab-pad-to", "128")
    after = made.read(out)
    assert after.keys() == before.keys()
    for name, t in after.items():
        padded = name in (EMBED, HEAD)
        assert t.shape == ((128, 64) if padded else before[name].shape)
        assert t.data == before[name].data + bytes(16 * 64 * 2 if padded else 0)
    assert config(out) == {**config(tmp_path / "m"), "vocab_size": 128}
    assert body["result"]["proof"]["logits"]["max_abs_dlogit"] == 0
    assert body["result"]["parameters"] == sum(math.prod(t.shape) for t in after.values())
    same, out = convert(tmp_path / "m", "--vocab-pad-to", "112")
    assert (made.read(out), same["warnings"]) == (before, [])


def test_padding_to_another_layout(convert: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    before = made.llama(tmp_path / "m")
    _, out = convert(tmp_path / "m", "--vocab-pad-to", "128", "--to", "meta")
    state = torch.load(out / "consolidated.00.pth", weights_only=True)
    assert json.loads((out / "params.json").read_text())["vocab_size"] == 128
    for name, own in (("tok_embeddings.weight", EMBED), ("output.weight", HEAD)):
        assert state[name].shape == (128, 64)
        assert not state[name][112:].any()
        assert bytes(state[name][:112].view(torch.uint8).flatten().tolist()) == before[own].data


# ---- ranks, context


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_together_are_the_whole(convert: Any, tmp_path: Path, n: int) -> None:
    torch = pytest.importorskip("torch")
    made.llama(tmp_path / "m", num_key_value_heads=4)
    _, one = convert(tmp_path / "m", "--to", "meta")
    body, many = convert(tmp_path / "m", "--to", "meta", "--ranks", str(n))
    whole = torch.load(one / "consolidated.00.pth", weights_only=True)
    parts = [torch.load(f, weights_only=True) for f in sorted(many.glob("*.pth"))]
    assert sorted(f.name for f in many.glob("*.pth")) == [f"consolidated.{i:02d}.pth" for i in range(n)]
    assert [p.keys() for p in parts] == [whole.keys()] * n
    for name, t in whole.items():
        axis = None if t.dim() == 1 else 1 if re.search(r"\.(wo|w2)\.weight", name) else 0
        pieces = [p[name] for p in parts]
        if name == "tok_embeddings.weight" and pieces[0].shape[0] == t.shape[0]:
            axis = 1
        joined = torch.cat(pieces, axis) if axis is not None else pieces[0]
        assert torch.equal(joined, t)
        assert axis is not None or all(torch.equal(p, pieces[0]) for p in pieces)
    assert (many / "params.json").read_bytes() == (one / "params.json").read_bytes()
    assert body["result"]["proof"]["exact"] == 21
    _, back = convert(many)
    assert made.read(back) == made.read(tmp_path / "m")


def test_what_ranks_cannot_share_is_refused(cli: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "m")
    for n in ("3", "4", "5", "99"):  # 2 KV heads, and 112 rows
        assert f"among {n} ranks" in refused(cli, tmp_path / "m", "--to", "meta", "--ranks", n, code=2, word="ranks")


def test_a_length_that_only_a_person_knows(cli: Any, convert: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made.llama(tmp_path / "m")
    _, meta = convert(tmp_path / "m", "--to", "meta", "--no-proof")
    _, kept = convert(meta, "--no-proof")  # the manifest beside params.json still says it
    assert config(kept)["max_position_embeddings"] == 128
    (meta / MANIFEST).unlink()
    said = refused(cli, meta, "--to", "gguf", code=3, word="context-unknown")
    assert "--context N" in said
    _, out = convert(meta, "--to", "gguf", "--context", "2048", "--no-proof")
    field = gguf.GGUFReader(out / "model.gguf").get_field("llama.context_length")
    assert field is not None
    assert field.contents() == 2048
    assert config(convert(meta, "--context", "2048", "--no-proof")[1])["max_position_embeddings"] == 2048


# ---- what goes along


CARRIED = {"tokenizer.json": "{}", "tokenizer_config.json": "{}", "special_tokens_map.json": "{}",
           "generation_config.json": '{"eos_token_id": 2}', "chat_template.jinja": "{{ x }}", "merges.txt": "a b",
           "vocab.json": "{}", "README.md": "# it", "LICENSE": "yes", "USE_POLICY.md": "be good", "NOTICE.txt": "n"}
LEFT = {".gitattributes": "x", "training_args.bin": "x", "notes.txt": "x", "modeling_x.py": "import os", "run.sh": "x",
        ".DS_Store": "x", "old/config.json": "{}"}


@pytest.mark.parametrize("to", ["hf", "lesson", "meta"])
def test_what_stands_beside_the_weights_goes_along(convert: Any, tmp_path: Path, to: str) -> None:
    made.llama(tmp_path / "m")
    (tmp_path / "m" / "old").mkdir()
    for name, text in (CARRIED | LEFT).items():
        (tmp_path / "m" / name).write_text(text)
    (tmp_path / "m" / "LICENSES").mkdir()
    body, out = convert(tmp_path / "m", "--to", to, "--no-proof")
    own = {"meta": {"params.json", "consolidated.00.pth"}}.get(to, {"config.json", "model.safetensors"})
    assert set(os.listdir(out)) == {*CARRIED, *own, MANIFEST}
    assert {n: (out / n).read_text() for n in CARRIED} == CARRIED
    assert {f["name"] for f in body["result"]["files"]} == {*CARRIED, *own}
    _, bare = convert(tmp_path / "m", "--to", to, "--no-proof", "--no-tokenizer")
    assert set(os.listdir(bare)) == {*own, MANIFEST}


def test_a_gguf_file_holds_the_tokenizer_or_says_that_it_does_not(convert: Any, tmp_path: Path, speaker: Any) -> None:
    gguf = pytest.importorskip("gguf")
    made.llama(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
    for flags, told, words in (((), [], 112), (("--no-tokenizer",), [], 0)):
        body, out = convert(tmp_path / "m", "--to", "gguf", "--no-proof", *flags)
        field = gguf.GGUFReader(out / "model.gguf").get_field("tokenizer.ggml.tokens")
        assert (0 if field is None else len(field.contents())) == words
        assert [w["code"] for w in body["warnings"]] == told
    (tmp_path / "m" / "tokenizer.json").unlink()
    assert "tokenizer-none" in warned(convert(tmp_path / "m", "--to", "gguf", "--no-proof")[0])


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_modes_are_what_the_umask_says(convert: Any, tmp_path: Path, umask: int, file: int, folder: int) -> None:
    made.llama(tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text("x")
    for path in (tmp_path / "m").iterdir():
        path.chmod(0o400)
    before = os.umask(umask)
    try:
        made_ = [convert(tmp_path / "m", "--to", to, "--no-proof")[1] for to in ("hf", "meta", "gguf")]
    finally:
        os.umask(before)
    for out in made_:
        assert out.stat().st_mode & 0o7777 == folder
        assert {f.stat().st_mode & 0o7777 for f in out.iterdir()} == {file}


# ---- configs


def test_every_word_of_a_config_is_kept(convert: Any, tmp_path: Path) -> None:
    """Also those that nobody here knows, in their order; what is asked for changes, and nothing else."""
    more = {"some_new_key": {"a": [1, None, 2.5]}, "_name_or_path": "\u65e5\u672c \U0001f999", "bos_token_id": 1,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "use_cache": True, "transformers_version": "9.9"}
    made.llama(tmp_path / "m", **more)
    before = config(tmp_path / "m")
    for to in ("hf", "lesson"):
        assert list(config(convert(tmp_path / "m", "--to", to, "--no-proof")[1]).items()) == list(before.items())
    _, out = convert(tmp_path / "m", "--no-proof", "--dtype", "fp32", "--kv-heads", "8", "--vocab-pad-to", "128")
    assert config(out) == {**before, "torch_dtype": "float32", "num_key_value_heads": 8, "vocab_size": 128}


@pytest.mark.parametrize("words", [
    {"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}])
def test_the_dtype_is_told_by_the_word_that_was_there(convert: Any, tmp_path: Path, words: dict[str, Any]) -> None:
    made.llama(tmp_path / "m")
    plain = {k: v for k, v in config(tmp_path / "m").items() if k != "torch_dtype"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(plain | words))
    found = config(convert(tmp_path / "m", "--dtype", "fp32", "--no-proof")[1])
    assert found == plain | dict.fromkeys(words, "float32")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("stretched", [False, True])
def test_a_config_in_metas_words_and_back(convert: Any, tmp_path: Path, stretched: bool) -> None:
    more: dict[str, Any] = {"rope_scaling": LLAMA3, "max_position_embeddings": 131072} if stretched else {}
    made.llama(tmp_path / "m", rope_theta=500000.0, **more)
    _, out = convert(tmp_path / "m", "--to", "meta", "--no-proof")
    params = json.loads((out / "params.json").read_text())
    assert params == params | {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 2, "vocab_size": 112,
                               "norm_eps": 1e-5, "rope_theta": 500000.0}
    assert params.get("use_scaled_rope", False) is stretched
    width = int(2 * 4 * 64 / 3)  # Meta's own rule
    width = int(params.get("ffn_dim_multiplier", 1) * width)
    assert params["multiple_of"] * -(-width // params["multiple_of"]) == 96
    _, back = convert(out, "--no-proof")
    found = config(back)
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                "num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "model_type",
                "architectures", "max_position_embeddings", "torch_dtype"):
        assert found[key] == config(tmp_path / "m")[key], key
    assert found.get("rope_scaling") == (LLAMA3 if stretched else None)


def test_a_config_in_nanogpts_words_and_back(convert: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    made.gpt2(tmp_path / "m")
    body, out = convert(tmp_path / "m", "--to", "nanogpt", "--no-proof")
    assert "nanogpt-gelu" in warned(body)
    saved = torch.load(out / "ckpt.pt", weights_only=True)
    assert saved["model_args"] == {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "bias": True,
                                   "vocab_size": 101, "dropout": 0.0}
    assert {"model", "model_args", "iter_num", "config"} <= saved.keys()
    found = config(convert(out, "--no-proof")[1])
    for key, value in config(tmp_path / "m").items():
        assert found[key] == value, key


def test_a_config_in_ggufs_words(convert: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    made.llama(tmp_path / "m", rope_theta=500000.0)
    _, out = convert(tmp_path / "m", "--to", "gguf", "--no-proof")
    reader = gguf.GGUFReader(out / "model.gguf")
    want = {"general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
            "llama.feed_forward_length": 96, "llama.attention.head_count": 8, "llama.attention.head_count_kv": 2,
            "llama.context_length": 128, "llama.vocab_size": 112, "llama.rope.freq_base": 500000.0}
    assert {k: reader.get_field(k).contents() for k in want} == want


# ---- the manifest


def hashes(data: bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(data))


def test_the_digests_are_those_of_the_bytes_in_the_files(convert: Any, tmp_path: Path) -> None:
    torch, gguf = pytest.importorskip("torch"), pytest.importorskip("gguf")
    made.llama(tmp_path / "m")
    _, out = convert(tmp_path / "m", "--shard-size", "50kB", "--no-proof")
    for t in manifest(out)["tensors"]:
        assert t["digest"] == hashes(made.read(out / t["file"])[t["name"]].data)
    _, out = convert(tmp_path / "m", "--to", "meta", "--ranks", "2", "--no-proof")
    for t in manifest(out)["tensors"]:
        x = torch.load(out / t["file"], weights_only=True)[t["name"]].contiguous()
        assert t["digest"] == hashes(bytes(x.view(torch.uint8).flatten().tolist()))
        assert (list(x.shape), t["nbytes"]) == (t["shape"], x.numel() * 2)
    _, out = convert(tmp_path / "m", "--to", "gguf", "--no-proof")
    stored = {t.name: t for t in gguf.GGUFReader(out / "model.gguf").tensors}
    for t in manifest(out)["tensors"]:
        assert t["digest"] == hashes(stored[t["name"]].data.tobytes())
    _, out = convert(tmp_path / "m", "--dtype", "fp16", "--no-proof")
    for t in manifest(out)["tensors"]:
        assert t["digest"] == hashes(made.read(out)[t["name"]].data)


def test_the_manifest_says_from_where_everything_came(convert: Any, tmp_path: Path) -> None:
    import llamactl

    made.llama(tmp_path / "m", change={"model.layers.0.self_attn.rotary_emb.inv_freq": made.noise("F32", (4,), 1)})
    _, out = convert(tmp_path / "m", "--to", "lesson", "--dtype", "fp32")
    found = manifest(out)
    assert found["format"] == 1
    assert found["tool"] == {"name": "llamactl", "version": llamactl.__version__}
    assert found["source"] == {"source": "local", "id": "m", "revision": None, "layout": "hf",
                               "path": str(tmp_path / "m" / "config.json")}
    assert (found["layout"], found["family"], found["parameters"]) == ("lesson", "llama", 72000)
    assert [i["name"] for i in found["ignored"]] == ["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert found["ignored"][0]["why"]
    assert found["proof"]["exact"] == 21
    of = {t["name"]: t for t in found["tensors"]}
    assert of.keys() == made.read(out).keys()
    assert of["blocks.1.ff.w3.weight"]["sources"] == ["model.layers.1.mlp.down_proj.weight"]
    assert of["blocks.1.ff.w3.weight"]["ops"] == ["BF16 -> F32"]
    assert of["blocks.0.gqa.wq.weight"]["ops"] == ["rows put in RoPE's other order", "BF16 -> F32"]
    assert sorted(s for t in found["tensors"] for s in t["sources"]) == sorted(
        n for n in made.read(tmp_path / "m") if "rotary" not in n)


@pytest.mark.parametrize("flags", [(), ("--to", "meta", "--ranks", "2"), ("--to", "gguf"), ("--to", "lesson"),
                                   ("--dtype", "fp16"), ("--kv-heads", "1"), ("--shard-size", "50kB")], ids="-".join)
def test_the_same_run_writes_the_same_bytes(convert: Any, tmp_path: Path, flags: tuple[str, ...]) -> None:
    made.llama(tmp_path / "m")
    (_, one), (_, other) = (convert(tmp_path / "m", *flags) for _ in range(2))
    assert made.tree(one) == made.tree(other)


def test_the_same_run_of_a_gpt2_writes_the_same_bytes(convert: Any, tmp_path: Path) -> None:
    made.gpt2(tmp_path / "m")
    (_, one), (_, other) = (convert(tmp_path / "m", "--to", "nanogpt") for _ in range(2))
    assert made.tree(one) == made.tree(other)


# ---- the proof


@pytest.mark.parametrize("to", ["hf", "lesson", "meta", "gguf"])
def test_a_flipped_bit_on_the_way_is_found_and_nothing_is_published(cli: Any, tmp_path: Path, to: str,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is damaged after the digest was taken, as a bad disk would."""
    from llamactl.checkpoint import staging

    made.llama(tmp_path / "m")
    seen: list[Path] = []
    create = staging.Staging.create

    def damaged(self: Any, name: str) -> Any:
        if name == MANIFEST and not seen:
            pytest.fail("the manifest was made before the proof")
        file = create(self, name)
        if name.endswith((".safetensors", ".pth", ".gguf")):
            close = file.close

            def spoilt() -> None:
                close()
                path = Path(self.path) / name
                if path not in seen:
                    seen.append(path)
                    data = bytearray(path.read_bytes())
                    needle = made.read(tmp_path / "m")[UP].data
                    data[data.index(needle) + 1000] ^= 0x10
                    path.write_bytes(data)

            class Spoilt:
                def __enter__(self) -> Any:
                    return file

                def __exit__(self, *_: object) -> None:
                    spoilt()

            return Spoilt()
        return file

    monkeypatch.setattr(staging.Staging, "create", damaged)
    got = cli("convert", tmp_path / "m", tmp_path / "out", "--to", to)
    assert (got.code, got.out) == (1, "")
    assert got.err.startswith("error[proof-failed]: layers.1.mlp.up.weight, read back, is not the source's")
    assert sorted(os.listdir(tmp_path)) == ["m"]


def test_a_config_that_says_another_model_is_found(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.cli import targets

    made.llama(tmp_path / "m")
    words = targets.hf_words
    monkeypatch.setattr(targets, "hf_words", lambda *a: {**words(*a), "rope_theta": 20000.0})
    got = cli("convert", tmp_path / "m", tmp_path / "out")
    assert got.code == 1
    assert got.err.startswith("error[proof-failed]: the config as written describes another model: ")
    assert "theta" in got.err
    assert sorted(os.listdir(tmp_path)) == ["m"]
