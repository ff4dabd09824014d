"""Which weights of a folder are read, what they add up to, and what is refused or noted."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from llamactl.checkpoint import gguf
from llamactl.checkpoint.folder import FolderWeights, read_folder
from llamactl.checkpoint.index import INDEX
from llamactl.checkpoint.safetensors import BITS
from llamactl.errors import InputRefused, LlamactlError, NotAvailable

Shapes = Mapping[str, tuple[int, ...]]


def llama(hidden: int, heads_kv: int, inner: int, layers: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """The tensors of an untied Llama in the names of transformers; heads_kv: rows of k_proj and v_proj."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for n in range(layers):
        p = f"model.layers.{n}."
        shapes |= {
            p + "self_attn.q_proj.weight": (hidden, hidden), p + "self_attn.k_proj.weight": (heads_kv, hidden),
            p + "self_attn.v_proj.weight": (heads_kv, hidden), p + "self_attn.o_proj.weight": (hidden, hidden),
            p + "mlp.gate_proj.weight": (inner, hidden), p + "mlp.up_proj.weight": (inner, hidden),
            p + "mlp.down_proj.weight": (hidden, inner), p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
        }  # fmt: skip
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


TINY = llama(64, 16, 96, 2, 101)  # 70,592 parameters
NAMES = sorted(TINY)
FIRST, SECOND = ({k: TINY[k] for k in part} for part in (NAMES[: len(NAMES) // 2], NAMES[len(NAMES) // 2 :]))
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def save(path: Path, shapes: Shapes, dtype: str = "F32", *, dtypes: Mapping[str, str] | None = None) -> int:
    """Write a safetensors file whose data is a hole in the file system; the bytes of its tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        kind = (dtypes or {}).get(name, dtype)
        end = at + math.prod(shape) * BITS[kind] // 8
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        f.truncate(8 + len(raw) + at)
    return at


def save_index(folder: Path, places: Mapping[str, Shapes], **changed: Any) -> dict[str, Any]:
    """Write an index that puts every tensor where `places` says."""
    total = sum(4 * math.prod(s) for part in places.values() for s in part.values())
    weight_map = {k: f for f, part in places.items() for k in part}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map, **changed}
    (folder / INDEX).write_text(json.dumps(index))
    return index


def sharded(folder: Path, **changed: Any) -> dict[str, Any]:
    save(folder / ONE, FIRST)
    save(folder / TWO, SECOND)
    return save_index(folder, {ONE: FIRST, TWO: SECOND}, **changed)


def refusal(folder: Path) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        read_folder(folder)
    assert str(folder) in caught.value.line()
    assert caught.value.line().isprintable()
    return caught.value


def codes(weights: FolderWeights) -> list[str]:
    return [code for code, _ in weights.warnings]


class TestTotals:
    def test_two_shards(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        w = read_folder(tmp_path)
        assert (w.elements, w.total_bytes, w.warnings) == (70_592, 282_368, ())
        assert [os.path.basename(h.path) for h in w.headers] == [ONE, TWO]
        assert {k: t.shape for k, t in w.tensors.items()} == TINY

    def test_single_file(self, tmp_path: Path) -> None:
        save(tmp_path / "model.safetensors", TINY, "BF16")
        w = read_folder(str(tmp_path))
        assert (w.elements, w.total_bytes, w.bytes_by_dtype, w.warnings) == (70_592, 141_184, {"BF16": 141_184}, ())

    def test_totals_of_the_index_are_not_believed(self, tmp_path: Path) -> None:
        save(tmp_path / ONE, FIRST, "BF16")
        save(tmp_path / TWO, SECOND, "BF16")
        save_index(tmp_path, {ONE: FIRST, TWO: SECOND}, metadata={"total_size": 1234, "total_parameters": 617})
        w = read_folder(tmp_path)
        assert (w.elements, w.total_bytes, codes(w)) == (70_592, 141_184, ["index-total"])
        assert "1,234" in w.warnings[0][1]
        assert "141,184" in w.warnings[0][1]

    def test_sixteen_gigabytes_by_their_header(self, tmp_path: Path, within: Any) -> None:
        save(tmp_path / "model.safetensors", llama(4096, 1024, 14336, 32, 128256), "BF16")
        with within(10):
            w = read_folder(tmp_path)
        assert (w.elements, w.total_bytes) == (8_030_261_248, 16_060_522_496)

    def test_packed_four_bit_bytes_are_stored_elements(self, tmp_path: Path) -> None:
        """bitsandbytes: two weights a byte, and bookkeeping beside each; the header alone cannot tell 66,752."""
        dense = {k: s for k, s in llama(64, 64, 128, 1, 200).items() if "proj" not in k}
        linear = {k: s for k, s in llama(64, 64, 128, 1, 200).items() if "proj" in k}
        packed: dict[str, tuple[int, ...]] = {}
        kinds = dict.fromkeys(dense, "BF16")
        for k, s in linear.items():
            packed |= {k: (math.prod(s) // 2, 1), f"{k}.absmax": (math.prod(s) // 64,), f"{k}.quant_map": (16,),
                       f"{k}.quant_state.bitsandbytes__nf4": (80,)}  # fmt: skip
            kinds |= {k: "U8", f"{k}.quant_state.bitsandbytes__nf4": "U8"}
        save(tmp_path / "model.safetensors", {**dense, **packed}, dtypes=kinds)
        w = read_folder(tmp_path)
        weights = [t for t in w.tensors.values() if t.name.endswith(".weight")]
        assert sum(t.elements for t in weights) == 46_272
        assert sum(t.elements * (2 if t.dtype == "U8" else 1) for t in weights) == 66_752
        assert w.elements == 46_272 + sum(math.prod(s) for k, s in packed.items() if not k.endswith(".weight"))

    def test_packed_gptq_words_are_stored_elements(self, tmp_path: Path) -> None:
        """GPTQ: eight weights an int32. 47,008 elements are stored, 172,416 weights are meant."""
        dense = {k: s for k, s in llama(128, 64, 256, 1, 96).items() if "proj" not in k}
        packed: dict[str, tuple[int, ...]] = {}
        kinds = dict.fromkeys(dense, "F16")
        for k, (out, width) in ((k, s) for k, s in llama(128, 64, 256, 1, 96).items() if "proj" in k):
            p = k.removesuffix(".weight")
            packed |= {p + ".qweight": (width // 8, out), p + ".qzeros": (width // 64, out // 8),
                       p + ".scales": (width // 64, out), p + ".g_idx": (width,)}  # fmt: skip
            kinds |= {p + ".qweight": "I32", p + ".qzeros": "I32", p + ".scales": "F16", p + ".g_idx": "I32"}
        size = save(tmp_path / "model.safetensors", {**dense, **packed}, dtypes=kinds)
        w = read_folder(tmp_path)
        assert (w.elements, w.total_bytes, sum(w.bytes_by_dtype.values())) == (47_008, size, size)
        assert sum(t.elements * 8 for t in w.tensors.values() if t.name.endswith(".qweight")) == 147_456
        assert sum(math.prod(s) for s in dense.values()) == 24_960


class TestWhichCopy:
    def test_the_same_weights_four_times(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        save(tmp_path / "consolidated.safetensors", {"tok_embeddings.weight": (101, 64)}, "BF16")
        (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
        (tmp_path / "training_args.bin").write_bytes(b"PK\x03\x04")
        (tmp_path / "original").mkdir()
        (tmp_path / "original" / "consolidated.00.pth").write_bytes(b"PK\x03\x04")
        w = read_folder(tmp_path)
        assert (w.elements, w.total_bytes, codes(w)) == (70_592, 282_368, ["weights-copies"])
        note = w.warnings[0][1]
        words = ("2 shards", ONE, "consolidated.safetensors", "pytorch_model.bin", "original/")
        assert [n for n in words if n not in note] == []
        assert "training_args" not in note

    def test_the_index_is_before_the_single_file(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        save(tmp_path / "model.safetensors", {"other": (3,)})
        w = read_folder(tmp_path)
        assert (w.elements, codes(w)) == (70_592, ["weights-copies"])

    def test_the_single_file_is_before_stray_shards(self, tmp_path: Path) -> None:
        save(tmp_path / "model.safetensors", TINY)
        save(tmp_path / ONE, FIRST)
        w = read_folder(tmp_path)
        assert (w.elements, codes(w)) == (70_592, ["weights-copies"])
        assert ONE in w.warnings[0][1]

    @pytest.mark.parametrize("names", [(ONE, TWO), ("m-0-of-2.safetensors", "m-1-of-2.safetensors"),
                                       ("consolidated-1-of-2.safetensors", "consolidated-2-of-2.safetensors")])
    def test_numbered_shards_without_an_index(self, names: tuple[str, str], tmp_path: Path) -> None:
        save(tmp_path / names[0], FIRST)
        save(tmp_path / names[1], SECOND)
        w = read_folder(tmp_path)
        assert (w.elements, codes(w)) == (70_592, ["index-missing"])
        assert [os.path.basename(h.path) for h in w.headers] == list(names)

    def test_ten_shards_come_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        for n in range(1, 11):
            save(tmp_path / f"m-{n}-of-10.safetensors", {f"t{n}": (n,)})
        assert list(read_folder(tmp_path).tensors) == [f"t{n}" for n in range(1, 11)]

    def test_numbered_shards_with_gaps(self, tmp_path: Path) -> None:
        for n in (2, 5):
            save(tmp_path / f"model-0000{n}-of-00005.safetensors", {f"t{n}": (1,)})
        error = refusal(tmp_path)
        assert error.code == "shard-missing"
        assert [n for n in (1, 3, 4) if f"model-0000{n}-of-00005.safetensors" not in error.message] == []
        assert "3 of 5" in error.message

    def test_a_huge_number_of_shards_is_not_counted_out(self, tmp_path: Path, within: Any) -> None:
        save(tmp_path / "m-1-of-999999.safetensors", {"t": (1,)})
        with within(5):
            assert "999,998 of 999,999" in refusal(tmp_path).message

    @pytest.mark.parametrize(
        "names",
        [
            ("a", "b"),
            ("model.fp16", "model.fp32"),
            (ONE.removesuffix(".safetensors"), "other"),
            ("a-1-of-2", "b-2-of-2"),
            ("m-1-of-2", "m-2-of-2", "m-1-of-3"),
            ("m-1-of-2", "m-01-of-2"),
            ("m-1-of-2", "m-2-of-2", "m-3-of-2"),
            ("m-1-of-0",),
        ],
    )
    def test_several_files_that_no_index_joins(self, names: tuple[str, ...], tmp_path: Path) -> None:
        for n in names:
            save(tmp_path / f"{n}.safetensors", {n: (1,)})
        error = refusal(tmp_path)
        assert error.code == "weights-ambiguous"
        assert all(n in error.message for n in names)

    def test_another_name_and_adapters(self, tmp_path: Path) -> None:
        save(tmp_path / "adapter_model.safetensors", {"lora": (1,)})
        assert codes(read_folder(tmp_path)) == ["weights-adapter"]
        save(tmp_path / "weights.safetensors", TINY)
        assert read_folder(tmp_path).elements == 70_592

    def test_appledouble_twins_are_no_weights(self, tmp_path: Path) -> None:
        save(tmp_path / "weights.safetensors", TINY)
        twin = bytes.fromhex("00051607000200004d6163204f5320582020202020202020") + bytes(4072)
        for name in ("._weights.safetensors", "._config.json", "._pytorch_model.bin"):
            (tmp_path / name).write_bytes(twin)
        w = read_folder(tmp_path)
        assert (w.elements, w.warnings) == (70_592, ())

    def test_only_pickles(self, tmp_path: Path) -> None:
        (tmp_path / "consolidated.00.pth").write_bytes(b"PK\x03\x04")
        error = refusal(tmp_path)
        assert error.code == "weights-format"
        assert "only PyTorch pickles ('consolidated.00.pth')" in error.message

    def test_only_gguf(self, tmp_path: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        error = refusal(tmp_path)
        assert (error.code, "m.gguf" in error.message) == ("weights-format", True)

    def test_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert refusal(tmp_path).code == "no-weights"

    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(NotAvailable) as caught:
            read_folder(tmp_path / "no")
        assert (caught.value.code, caught.value.message) == ("not-found", "no such folder")
        (tmp_path / "file").write_bytes(b"")
        assert refusal(tmp_path / "file").code == "not-a-folder"


class TestIndex:
    """What the index says against what the shards hold."""

    def test_byte_order_mark_and_unknown_keys(self, tmp_path: Path) -> None:
        index = sharded(tmp_path, tool={"v": 1})
        (tmp_path / INDEX).write_bytes(b"\xef\xbb\xbf" + json.dumps(index).encode())
        assert read_folder(tmp_path).warnings == ()

    @pytest.mark.parametrize(
        ("size", "noted"), [(282_368, False), (282_368.0, False), (282_367, True), ("282368", True), (True, True)]
    )
    def test_total_size(self, size: object, noted: bool, tmp_path: Path) -> None:
        sharded(tmp_path, metadata={"total_size": size})
        assert codes(read_folder(tmp_path)) == ["index-total"] * noted

    def test_total_size_absent(self, tmp_path: Path) -> None:
        sharded(tmp_path, metadata={})
        assert read_folder(tmp_path).warnings == ()

    def test_tensor_that_its_shard_lacks(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        save_index(tmp_path, {ONE: {**FIRST, "ghost": (1,)}, TWO: SECOND})
        error = refusal(tmp_path)
        assert (error.code, "'ghost'" in error.message) == ("index-mismatch", True)

    def test_tensor_in_the_other_shard(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        save_index(tmp_path, {ONE: {**FIRST, NAMES[-1]: (64,)}, TWO: {k: SECOND[k] for k in NAMES[len(FIRST) : -1]}})
        assert refusal(tmp_path).code == "index-mismatch"

    def test_tensor_that_the_index_forgot(self, tmp_path: Path) -> None:
        sharded(tmp_path, metadata={})
        save_index(tmp_path, {ONE: {k: FIRST[k] for k in NAMES[1 : len(FIRST)]}, TWO: SECOND}, metadata={})
        w = read_folder(tmp_path)
        assert (codes(w), NAMES[0] in w.warnings[0][1], w.elements) == (["index-unmapped"], True, 70_592)

    def test_tensor_in_two_shards(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        save(tmp_path / TWO, {NAMES[0]: FIRST[NAMES[0]], **SECOND})
        error = refusal(tmp_path)
        assert (error.code, NAMES[0] in error.message) == ("index-duplicate", True)

    def test_shard_that_nothing_points_to(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        save(tmp_path / "model-00003-of-00003.safetensors", FIRST)
        w = read_folder(tmp_path)
        assert (codes(w), w.elements) == (["index-orphan"], 70_592)
        assert "model-00003-of-00003.safetensors" in w.warnings[0][1]

    def test_shards_in_a_subfolder_and_behind_links(self, tmp_path: Path) -> None:
        save(tmp_path / "blobs" / "aa", FIRST)
        save(tmp_path / "sub" / TWO, SECOND)
        os.symlink("blobs/aa", tmp_path / ONE)
        save_index(tmp_path, {ONE: FIRST, f"sub/{TWO}": SECOND})
        w = read_folder(tmp_path)
        assert (w.elements, w.warnings) == (70_592, ())

    def test_shard_behind_a_link_away(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        sharded(tmp_path / "m")
        os.replace(tmp_path / "m" / TWO, tmp_path / "secret")
        os.symlink("../secret", tmp_path / "m" / TWO)
        assert refusal(tmp_path / "m").code == "link-outside"


class TestMissing:
    def test_shard_that_never_arrived(self, tmp_path: Path) -> None:
        third = len(NAMES) // 3 + 1
        parts = {f"model-0000{i + 1}-of-00003.safetensors": {k: TINY[k] for k in NAMES[i * third : (i + 1) * third]}
                 for i in range(3)}  # fmt: skip
        for name in (*parts,)[::2]:
            save(tmp_path / name, parts[name])
        save_index(tmp_path, parts)
        error = refusal(tmp_path)
        assert error.code == "shard-missing"
        assert "'model-00002-of-00003.safetensors'" in error.message
        assert "model-00001" not in error.message

    def test_all_of_them_at_once_and_why(self, tmp_path: Path) -> None:
        places: dict[str, Shapes] = {ONE: FIRST, "2.safetensors": {"b": (1,)}, "3.safetensors": {"c": (1,)},
                                     "4.safetensors": {"d": (1,)}, "5.safetensors": {"e": (1,)}}  # fmt: skip
        save(tmp_path / ONE, FIRST)
        (tmp_path / "2.safetensors").mkdir()
        os.symlink("../../blobs/gone", tmp_path / "3.safetensors")
        os.symlink("4.safetensors", tmp_path / "4.safetensors")
        save_index(tmp_path, places)
        error = refusal(tmp_path)
        words = ["4 of 5", "'2.safetensors' (a folder)", "../../blobs/gone", "'4.safetensors' (a link to 4.safetensors",
                 "'5.safetensors' (not there)"]
        assert (error.code, [w for w in words if w not in error.message]) == ("shard-missing", [])

    def test_a_line_of_many_names_ends_with_how_many_more(self, tmp_path: Path) -> None:
        places = {f"model-{n:05}-of-00200.safetensors": {f"t{n}": (1,)} for n in range(1, 201)}
        save(tmp_path / "model-00001-of-00200.safetensors", {"t1": (1,)})
        save_index(tmp_path, places)
        error = refusal(tmp_path)
        shown = error.message.count(".safetensors'")
        assert shown > 20
        assert error.message.endswith(f"and {199 - shown} more")
        assert error.message in error.line()

    def test_lfs_pointer_among_the_shards(self, tmp_path: Path) -> None:
        sharded(tmp_path)
        pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0123456789abcdef" * 4
        (tmp_path / TWO).write_bytes(pointer + b"\nsize 4976698672\n")
        error = refusal(tmp_path)
        assert (error.code, error.path, error.help) == ("lfs-pointer", str(tmp_path / TWO), "run 'git lfs pull'")

    def test_dangling_single_file(self, tmp_path: Path) -> None:
        os.symlink("../../blobs/gone", tmp_path / "model.safetensors")
        error = refusal(tmp_path)
        assert (error.code, "../../blobs/gone" in error.message) == ("dangling-link", True)


class TestStaleIndex:
    """An index of another build: none of the files it names is here."""

    @staticmethod
    def stale(folder: Path, shapes: Shapes = TINY) -> None:
        names = sorted(shapes)
        places = {f"model-0000{i + 1}-of-00004.safetensors": {k: shapes[k] for k in names[i::4]} for i in range(4)}
        save_index(folder, places, metadata={})

    def test_complete_shards_are_read(self, tmp_path: Path) -> None:
        save(tmp_path / ONE, FIRST)
        save(tmp_path / TWO, SECOND)
        self.stale(tmp_path)
        w = read_folder(tmp_path)
        assert (w.elements, codes(w)) == (70_592, ["index-stale"])
        note = w.warnings[0][1]
        assert [n for n in ("model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors", ONE, TWO)
                if n not in note] == []  # fmt: skip

    def test_a_complete_single_file_is_read(self, tmp_path: Path) -> None:
        save(tmp_path / "model.safetensors", TINY)
        self.stale(tmp_path)
        assert codes(read_folder(tmp_path)) == ["index-stale"]

    def test_weights_that_lack_a_tensor_are_refused(self, tmp_path: Path) -> None:
        save(tmp_path / "model.safetensors", FIRST)
        self.stale(tmp_path)
        error = refusal(tmp_path)
        assert error.code == "shard-missing"
        assert f"{len(SECOND)} of its tensors" in error.message
        assert "'model.safetensors'" in error.message

    def test_incomplete_shards_are_refused_with_both_lists(self, tmp_path: Path) -> None:
        save(tmp_path / ONE, FIRST)
        self.stale(tmp_path)
        error = refusal(tmp_path)
        assert (error.code, ONE in error.message) == ("shard-missing", True)
        assert "model-00004-of-00004.safetensors" in error.message

    def test_one_named_shard_present_is_not_stale_but_missing(self, tmp_path: Path) -> None:
        save(tmp_path / "model.safetensors", TINY)
        save(tmp_path / "model-00001-of-00004.safetensors", {NAMES[0]: TINY[NAMES[0]]})
        self.stale(tmp_path)
        assert refusal(tmp_path).code == "shard-missing"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scratch")
    sharded(folder)
    return folder


VALUES: some.SearchStrategy[Any] = (
    some.none() | some.booleans() | some.integers() | some.text(max_size=4) | some.just(ONE) | some.just([])
)
SHARDS = VALUES | some.text().map("{}.safetensors".format)
KEYS = some.sampled_from([*NAMES, "total_size"]) | some.text(max_size=3)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(some.dictionaries(some.sampled_from(["weight_map", "metadata", "x"]), VALUES | some.dictionaries(KEYS, SHARDS)))
def test_no_index_raises_anything_unexpected(scratch: Path, index: dict[str, Any]) -> None:
    (scratch / INDEX).write_text(json.dumps(index))
    with contextlib.suppress(LlamactlError):
        read_folder(scratch)


def test_shared_corpus(tmp_path: Path, within: Any) -> None:
    """The verdict and the code of every malformed folder of the workplace's corpus that a header can show."""
    make = Path(__file__).resolve().parents[2].parent / "shared" / "badinputs" / "make_badinputs.py"
    if not make.exists():
        pytest.skip("the corpus is not here")
    subprocess.run([sys.executable, str(make), str(tmp_path), "--special"], check=True, capture_output=True)
    cases = json.loads((tmp_path / "manifest.json").read_text())
    wrong, seen = [], 0
    for case in cases:
        if case["kind"] not in ("safetensors", "index", "gguf"):
            continue
        seen += 1
        folder = tmp_path / case["id"]
        try:
            with within(25):
                header = gguf.read_header(folder / "m.gguf") if case["kind"] == "gguf" else None
                read = header.notes if header else read_folder(folder).warnings
            found = ("warn" if read else "accept", ",".join(code for code, _ in read))
        except LlamactlError as e:
            found = ("reject", e.code)
        seen_in_data = case["code"].startswith("verify-")
        expected = ("accept", "") if seen_in_data else (case["expect"], case["code"])
        if found != expected:
            wrong.append((case["id"], expected, found))
    assert seen > 80
    assert wrong == []
