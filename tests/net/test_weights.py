"""Hugging Face folders: every canonical tensor bit for bit, as a view of the mapped file, all of it accounted for."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.net.decoder import build
from llamactl.net.weights import Weights, open_weights
from llamactl.spec.model import Model
from llamactl.spec.naming import read, stored_tensors

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def llama(written: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], State]:
    """(config, stored tensors) of the golden llama."""
    config = written.config_of("llama")
    return config, written.saved(tmp_path_factory.mktemp("llama"), config)


def opened(folder: Path, config: Mapping[str, Any]) -> tuple[Model, Weights]:
    model = arch.describe(dict(config), "config.json")
    return model, open_weights(str(folder), model, arch.names(model), layout="hf", ignored=arch.ignored(model))


def put(folder: Path, state: State, name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / name)
    return folder


def refused(folder: Path, config: Mapping[str, Any]) -> InputRefused:
    with pytest.raises(InputRefused) as e:
        opened(folder, config)
    assert e.value.path is not None
    assert e.value.help
    assert "\n" not in e.value.message
    return e.value


def codes(weights: Weights) -> list[str]:
    return [code for code, _ in weights.warnings]


LLAMA = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head",
    **{f"layers.{i}.{c}": f"model.layers.{i}.{s}" for i in range(3) for c, s in {
        "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
        "attn.o": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj",
        "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}.items()},
}


def test_llama_by_hand(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    model, weights = opened(put(tmp_path, state), config)
    assert set(weights.names()) == {f"{c}.weight" for c in LLAMA} == {t.name for t in model.tensors()}
    assert all(torch.equal(weights.tensor(f"{c}.weight"), state[f"{s}.weight"]) for c, s in LLAMA.items())
    assert codes(weights) == []


def test_gpt2_by_hand(written: Any, tmp_path: Path) -> None:
    """(in, out) matrices turned, q, k and v cut out of the fused one."""
    config = written.config_of("gpt2")
    state = written.saved(tmp_path, config)
    _, weights = opened(tmp_path, config)
    for i in range(3):
        h, at = f"transformer.h.{i}.", f"layers.{i}."
        parts = zip("qkv", state[f"{h}attn.c_attn.weight"].T.chunk(3), state[f"{h}attn.c_attn.bias"].chunk(3),
                    strict=True)
        for x, weight, bias in parts:
            assert torch.equal(weights.tensor(f"{at}attn.{x}.weight"), weight)
            assert torch.equal(weights.tensor(f"{at}attn.{x}.bias"), bias)
        assert torch.equal(weights.tensor(f"{at}mlp.down.weight"), state[f"{h}mlp.c_proj.weight"].T)


@pytest.mark.parametrize("golden", ["bloom", "deepseek_v3", "dbrx", "falcon-new", "gemma3", "gpt_neox", "gpt_oss",
                                    "gptj", "llama4_text", "mixtral", "phi3", "qwen2_moe", "qwen3_next", "stablelm"])
def test_every_kind_of_table(written: Any, tmp_path: Path, golden: str) -> None:
    """As the table reads whole stored tensors (what they hold is proved in tests/arch); experts one by one here."""
    config = written.config_of(golden)
    state = written.saved(tmp_path, config)
    model, weights = opened(tmp_path, config)
    want: State = {}
    for s in stored_tensors(model, arch.names(model)):
        want |= read(s, state[s.name], model)
    beside = {x.path.partition(".")[0] for section in model.sections for x in section.leaves}
    assert set(weights.names()) == {n for n in want if n.partition(".")[0] not in beside}
    for name in weights.names():
        assert torch.equal(weights.tensor(name), want[name]), name
        assert weights.dtype(name) == want[name].dtype
    assert codes(weights) == []


def test_a_network_reads_it(written: Any, tmp_path: Path) -> None:
    config = written.config_of("llama")
    written.saved(tmp_path, config, max_shard_size="40KB")
    model, weights = opened(tmp_path, config)
    decoder = build(model)
    decoder.assign(weights)
    ids, logits = written.golden_logits("llama")
    with torch.no_grad():
        assert (decoder(ids)[0] - logits).abs().max() < 2e-4


# --- views


def starts(weights: Weights, names: Iterator[str]) -> set[int]:
    return {weights.tensor(n).untyped_storage().data_ptr() for n in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_are_views_of_one_map(llama: tuple[dict[str, Any], State], tmp_path: Path, dtype: torch.dtype) -> None:
    config, state = llama
    state = {k: v.to(dtype) for k, v in state.items()}
    model, weights = opened(put(tmp_path, state), config)
    assert len(starts(weights, (t.name for t in model.tensors()))) == 1
    got = weights.tensor("layers.1.mlp.down.weight")
    assert got.dtype == weights.dtype("layers.1.mlp.down.weight") == dtype
    assert torch.equal(got, state["model.layers.1.mlp.down_proj.weight"])


def test_what_is_written_to_a_view_stays_off_the_file(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    _, weights = opened(put(tmp_path, state), config)
    weights.tensor("norm.weight").zero_()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["model.norm.weight"], state["model.norm.weight"])


def test_an_odd_offset_costs_one_copy(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    """Nothing in the format says that data begins at a multiple of the element size."""
    config, state = llama
    put(tmp_path, state)
    file = tmp_path / "model.safetensors"
    raw = file.read_bytes()
    (n,) = struct.unpack("<Q", raw[:8])
    header = json.dumps(json.loads(raw[8 : 8 + n])).encode()
    header += b" " * (-len(header) % 4 + 1)
    file.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + n :])
    _, weights = opened(tmp_path, config)
    assert all(torch.equal(weights.tensor(f"{c}.weight"), state[f"{s}.weight"]) for c, s in LLAMA.items())
    assert len(starts(weights, (f"{c}.weight" for c in LLAMA))) > 1


def test_a_file_that_shrinks_after_its_header_was_read(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    _, weights = opened(put(tmp_path, state), config)
    with (tmp_path / "model.safetensors").open("r+b") as f:
        f.truncate(1000)
    with pytest.raises(InputRefused) as e:
        weights.tensor("norm.weight")
    assert e.value.code == "file-changed"


MEMORY = """
import json, struct, sys
from pathlib import Path
import torch
from llamactl import arch
from llamactl.net.weights import open_weights

def private():
    return sum(int(x.split()[1]) for x in open("/proc/self/smaps_rollup") if x.startswith("Anonymous:")) * 1024

folder = Path(sys.argv[1])
config = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6,
          "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 12000, "tie_word_embeddings": False,
          "max_position_embeddings": 64}
model = arch.describe(config, "c")
header, at = {}, 0
from llamactl.spec.naming import stored_tensors
for s in stored_tensors(model, arch.names(model)):
    end = at + 2 * torch.Size(s.shape).numel()
    header[s.name] = {"dtype": "BF16", "shape": s.shape, "data_offsets": [at, end]}
    at = end
raw = json.dumps(header).encode()
raw += b" " * (-len(raw) % 8)
with (folder / "model.safetensors").open("wb") as f:
    f.write(struct.pack("<Q", len(raw)) + raw)
    f.truncate(8 + len(raw) + at)
torch.zeros(10).sum()
before = private()
weights = open_weights(str(folder), model, arch.names(model), layout="hf")
kept = [weights.tensor(n) for n in weights.names()]
read = sum(float(t.view(torch.int16).max()) for t in kept)
print(at, private() - before, read)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="private memory is read from /proc")
def test_private_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    size, grown, _ = done.stdout.split()
    assert int(size) > 180_000_000
    assert int(grown) < 20_000_000


# --- what is stored, against what is needed


@pytest.mark.parametrize(("old", "new"), [("model.", ""), ("", "_orig_mod."), ("", "module.")])
def test_known_prefixes_are_seen_through(llama: tuple[dict[str, Any], State], tmp_path: Path, old: str, new: str
                                         ) -> None:
    config, state = llama
    put(tmp_path, {new + k.removeprefix(old): v for k, v in state.items()})
    _, weights = opened(tmp_path, config)
    assert torch.equal(weights.tensor("layers.2.attn.k.weight"), state["model.layers.2.self_attn.k_proj.weight"])


def test_a_foreign_prefix_is_not(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    put(tmp_path, {k.replace("model.", "backbone."): v for k, v in state.items()})
    assert refused(tmp_path, config).code == "weights-missing"


def test_all_missing_tensors_are_named(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    lost = ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
    e = refused(put(tmp_path, {k: v for k, v in state.items() if k not in lost}), config)
    assert e.code == "weights-missing"
    assert e.exit_code == 3
    assert all(name in e.message for name in lost)
    assert e.message.startswith("2 tensors of the model not among the 28 stored: ")


def test_a_long_list_of_missing_tensors_is_cut(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    e = refused(put(tmp_path, {"model.norm.weight": state["model.norm.weight"]}), config)
    assert e.message.count("model.layers") <= 20
    assert e.message.endswith("and 9 more")


def test_an_untied_head_that_is_not_stored(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    e = refused(put(tmp_path, {k: v for k, v in state.items() if k != "lm_head.weight"}), config)
    assert e.code == "weights-missing"
    assert "tie_word_embeddings" in str(e.help)


def test_another_shape_is_named_with_both(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    name = "model.layers.0.mlp.up_proj.weight"
    e = refused(put(tmp_path, {**state, name: state[name][:-1]}), config)
    assert e.code == "weights-shape"
    assert e.message == f"1 tensor shaped otherwise: {name}: [55, 48] stored, [56, 48] by the config"


def test_a_transposed_matrix_has_another_shape(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    name = "model.layers.0.mlp.up_proj.weight"
    assert refused(put(tmp_path, {**state, name: state[name].T.contiguous()}), config).code == "weights-shape"


def test_a_stranger_is_named_and_not_used(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    _, weights = opened(put(tmp_path, {**state, "model.layers.0.extra": torch.ones(2)}), config)
    assert weights.warnings == (("weights-unexpected", "not part of this model, and not used: 1 tensor: "
                                 "model.layers.0.extra"),)


def test_leftovers_of_known_tools_are_no_news(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    _, weights = opened(put(tmp_path, {**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}), config)
    assert codes(weights) == []


def test_a_head_stored_beside_a_tied_embedding(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    tied = {**config, "tie_word_embeddings": True}
    copy = {"lm_head.weight": state["model.embed_tokens.weight"].clone()}
    _, weights = opened(put(tmp_path / "equal", state | copy), tied)
    assert codes(weights) == []
    _, weights = opened(put(tmp_path / "other", state), tied)
    assert codes(weights) == ["weights-head-differs"]
    assert "head.weight" not in weights.names()


def test_towers_are_not_needed_and_not_given(written: Any, tmp_path: Path) -> None:
    config = written.config_of("gemma3")
    state = written.saved(tmp_path / "a", config)
    _, weights = opened(tmp_path / "a", config)
    assert not any(n.startswith(("vision", "projector")) for n in weights.names())
    assert codes(weights) == []
    _, alone = opened(put(tmp_path / "b", {k: v for k, v in state.items() if "vision" not in k}), config)
    assert codes(alone) == ["weights-section"]
    assert alone.names() == weights.names()


# --- quantised


@pytest.mark.parametrize(("change", "what"), [
    ({"self_attn.q_proj.weight": None, "self_attn.q_proj.qweight": torch.ones(6, 72, dtype=torch.int32),
      "self_attn.q_proj.scales": torch.ones(1, 72), "self_attn.q_proj.qzeros": torch.ones(1, 9, dtype=torch.int32)},
     "gptq"),
    ({"mlp.up_proj.weight": torch.zeros(56, 48, dtype=torch.float8_e4m3fn),
      "mlp.up_proj.weight_scale_inv": torch.ones(1, 1)}, "fp8"),
    ({"mlp.up_proj.weight": torch.zeros(56, 48, dtype=torch.int8), "mlp.up_proj.SCB": torch.ones(56)},
     "bitsandbytes-8bit"),
    ({"mlp.up_proj.weight": torch.zeros(56 * 24, 1, dtype=torch.uint8), "mlp.up_proj.weight.absmax": torch.ones(42),
      "mlp.up_proj.weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "bitsandbytes"),
    ({"mlp.up_proj.weight_packed": torch.zeros(56, 24, dtype=torch.uint8),
      "mlp.up_proj.weight_scale": torch.ones(56, 3)}, "nvfp4"),
    ({"mlp.up_proj.W_q": torch.zeros(4)}, "HQQ"),
])
def test_quantised_weights_are_refused_by_method(llama: tuple[dict[str, Any], State], tmp_path: Path,
                                                 change: dict[str, Tensor | None], what: str) -> None:
    config, state = llama
    changed = {**state, **{f"model.layers.0.{k}": v for k, v in change.items()}}
    e = refused(put(tmp_path, {k: v for k, v in changed.items() if v is not None}), config)
    assert e.code == "weights-quantized"
    assert what in e.message


def test_the_configs_word_for_the_method_is_used(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    put(tmp_path, {**state, "model.layers.0.mlp.up_proj.weight": torch.zeros(56, 48, dtype=torch.float8_e4m3fn),
                   "model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)})
    e = refused(tmp_path, {**config, "quantization_config": {"quant_method": "fbgemm_fp8"}})
    assert "(fbgemm_fp8)" in e.message


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int32])
def test_a_type_that_is_no_plain_float(llama: tuple[dict[str, Any], State], tmp_path: Path, dtype: torch.dtype) -> None:
    config, state = llama
    e = refused(put(tmp_path, {**state, "model.norm.weight": torch.zeros(48, dtype=dtype)}), config)
    assert e.code == "weights-dtype"
    assert "model.norm.weight" in e.message


def test_a_cut_file(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    put(tmp_path, state)
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw[:-100])
    assert refused(tmp_path, config).code == "st-truncated"


def test_one_tensor_in_two_shards(llama: tuple[dict[str, Any], State], tmp_path: Path) -> None:
    config, state = llama
    for n in (1, 2):
        put(tmp_path, state, f"model-0000{n}-of-00002.safetensors")
    assert refused(tmp_path, config).code == "index-duplicate"


def test_draft_layers_that_the_description_leaves_out_are_no_news(written: Any, tmp_path: Path) -> None:
    config = written.config_of("deepseek_v3", num_nextn_predict_layers=1)
    state = written.saved(tmp_path, config)
    n = config["num_hidden_layers"]
    _, weights = opened(put(tmp_path, {**state, f"model.layers.{n}.eh_proj.weight": torch.ones(2)}), config)
    assert codes(weights) == []
    _, weights = opened(put(tmp_path, {**state, f"model.layers.{n + 3}.eh_proj.weight": torch.ones(2)}), config)
    assert codes(weights) == ["weights-unexpected"]
