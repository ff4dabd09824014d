"""The inventory: each thing that can be wrong in the files is found once planted, and not before."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llamactl import arch
from llamactl.analysis.verification import Finding, Inventory
from llamactl.checkpoint.gguf import GGML_TYPES
from llamactl.cli.located import locate, open_files
from llamactl.cli.options import Access
from llamactl.errors import InputRefused
from llamactl.net.weights_bytes import buffer
from llamactl.net.weights_gguf import QUANTISED, packed, unpacked
from llamactl.net.weights_mapped import DTYPES
from llamactl.spec.naming import stored_tensors
from llamactl.verify import scan as scanning
from llamactl.verify.inventory import HANDFUL, SHOWN, take
from llamactl.verify.scan import BLOCK, SCALES, scan

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
GPT2 = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "gpt2-bytes-trained"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}
GEMMA: dict[str, Any] = {**LLAMA, "model_type": "gemma", "head_dim": 8, "hidden_act": "gelu_pytorch_tanh",
                         "tie_word_embeddings": True}
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q1, K1, DOWN2 = (f"model.layers.{x}.weight" for x in ("1.self_attn.q_proj", "1.self_attn.k_proj", "2.mlp.down_proj"))
NORMS = [f"model.layers.{i}.{n}.weight" for i in range(3) for n in ("input_layernorm", "post_attention_layernorm")]
Tensors = dict[str, Tensor]
DRAWN: dict[str, Tensors] = {}


def drawn(config: Mapping[str, Any]) -> Tensors:
    """Random weights: norms at 1 +- 0.3, or 0 +- 0.3 where the config is of a Gemma."""
    key = json.dumps(config)
    if key not in DRAWN:
        model, g = arch.describe(dict(config), "config.json"), torch.Generator().manual_seed(3)
        around = 0.0 if config["model_type"] == "gemma" else 1.0
        DRAWN[key] = {s.name: torch.randn(s.shape, generator=g) * 0.3 + (around if "norm" in s.name else 0.0)
                      for s in stored_tensors(model, arch.names(model))}
    return {n: t.clone() for n, t in DRAWN[key].items()}


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Inventory]:
    """look(config, tensors): of these as a folder; look(path=...): of what is there."""

    def call(config: Mapping[str, Any] = LLAMA, tensors: Mapping[str, Tensor] | None = None, *,
             path: Path | None = None, seen: Callable[[int], None] = lambda _: None) -> Inventory:
        if path is None:
            (tmp_path / "config.json").write_text(json.dumps(dict(config)))
            save_file({k: v.clone().contiguous() for k, v in (tensors or drawn(config)).items()},
                      tmp_path / "model.safetensors")
        at = locate(str(path or tmp_path), Access(offline=True, hub=False))
        return take(at.path, at.model, arch.names(at.model, at.layout), open_files(at), layout=at.layout,
                    ignored=arch.ignored(at.model, at.layout), seen=seen)

    return call


def one(found: Inventory, code: str, level: str) -> Finding:
    """The only finding."""
    assert [(f.code, f.level) for f in found.findings] == [(code, level)]
    return found.findings[0]


def codes(found: Inventory) -> list[str]:
    return [f.code for f in found.findings]


# --- clean ones


def test_clean(look: Callable[..., Inventory]) -> None:
    read: list[int] = []
    tensors = drawn(LLAMA)
    found = look(LLAMA, tensors, seen=read.append)
    means = sorted(float(t.double().mean()) for n, t in tensors.items() if "norm" in n)
    elements = sum(t.numel() for t in tensors.values())
    assert found.findings == ()
    assert (found.tensors, found.parameters, found.head, found.nan, found.inf) == (
        len(tensors), elements, "untied", 0, 0)
    assert found.dtypes == (("F32", elements),)
    assert found.norm_mean == pytest.approx((means[0], means[3], means[-1]), abs=1e-9)
    assert sum(read) == 4 * elements


@pytest.mark.parametrize("name", ["cohere-qk-norm", "gemma2", "gpt2", "granitemoe", "nemotron", "qwen3_5_text"])
def test_no_golden_is_accused(look: Callable[..., Inventory], written: Any, tmp_path: Path, name: str) -> None:
    written.saved(tmp_path / "m", written.config_of(name))
    assert look(path=tmp_path / "m").findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(p.parent.name for p in GOLDEN.glob("*/logits.json")))
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_none_of_all_goldens(look: Callable[..., Inventory], written: Any, tmp_path: Path, name: str) -> None:
    config = json.loads((GOLDEN / name / "config.json").read_text())
    written.saved(tmp_path / "m", config)
    assert [f for f in look(path=tmp_path / "m").findings if f.level != "note"] == []


@pytest.mark.skipif(not GPT2.is_dir(), reason="the trained GPT-2 is not here")
def test_trained(look: Callable[..., Inventory]) -> None:
    found = look(path=GPT2)
    assert found.findings == ()
    assert found.head == "tied"
    assert found.norm_mean == pytest.approx((0.9224, 0.9773, 1.1304), abs=1e-4)


def test_a_trained_model_may_have_small_norms(look: Callable[..., Inventory]) -> None:
    """As SmolLM2: means from 0.001, half of one norm negative, 0.25 in the median."""
    tensors = drawn(LLAMA)
    for n, name in enumerate(NORMS):
        tensors[name] = (tensors[name] - 1) if n == 0 else 0.2 + tensors[name].abs() * 0.05
    assert look(LLAMA, tensors).findings == ()


# --- values


@pytest.mark.parametrize(("value", "code"), [(math.nan, "nan-values"), (math.inf, "inf-values"),
                                             (-math.inf, "inf-values")])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_nan_and_inf(look: Callable[..., Inventory], value: float, code: str, dtype: torch.dtype) -> None:
    word = str(dtype).removeprefix("torch.")
    tensors = {n: t.to(dtype) for n, t in drawn(LLAMA).items()}
    tensors[DOWN2][7, 5] = tensors[DOWN2][60, 95] = value
    found = look({**LLAMA, "torch_dtype": word}, tensors)
    f = one(found, code, "error")
    assert f.tensor == DOWN2
    assert "2 of 6,144 values" in f.message
    assert "at [7, 5] (value 677)" in f.message
    assert (found.nan, found.inf) == ((2, 0) if code == "nan-values" else (0, 2))


def test_the_first_in_a_later_block(look: Callable[..., Inventory]) -> None:
    """A tensor longer than a block, with both kinds, and a NaN beside a value that counts."""
    config = {**LLAMA, "vocab_size": 9000}
    tensors = drawn(config)
    assert tensors[HEAD].nbytes > 2 * BLOCK
    tensors[HEAD][8999, 63], tensors[HEAD][8998, 1], tensors[HEAD][8998, 2] = math.inf, math.nan, 1e5
    found = look(config, tensors)
    assert codes(found) == ["nan-values", "inf-values", "beyond-fp16"]
    assert "at [8998, 1] (value 575,873)" in found.findings[0].message
    assert "at [8999, 63] (value 575,999)" in found.findings[1].message
    assert "100,000" in found.findings[2].message


def test_what_is_no_weight_is_not_looked_at(look: Callable[..., Inventory]) -> None:
    tensors = drawn(LLAMA) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((4,), math.inf)}
    read: list[int] = []
    assert look(LLAMA, tensors, seen=read.append).findings == ()
    assert sum(read) == sum(t.nbytes for t in tensors.values())


def test_a_stranger_is_told_apart(look: Callable[..., Inventory]) -> None:
    found = look(LLAMA, drawn(LLAMA) | {"odd.weight": torch.full((4, 4), math.nan)})
    assert [(f.code, f.level) for f in found.findings] == [("weights-unexpected", "warning"), ("nan-values", "warning")]
    assert "not used" in found.findings[1].message


def test_missing_tensors_are_refused_as_ever(look: Callable[..., Inventory]) -> None:
    tensors = drawn(LLAMA)
    del tensors[DOWN2]
    with pytest.raises(InputRefused, match="not among") as e:
        look(LLAMA, tensors)
    assert e.value.code == "weights-missing"


@pytest.mark.parametrize(("fill", "code"), [(0.0, "zero-tensor"), (-0.0, "zero-tensor"), (0.25, "constant-tensor")])
def test_constant_matrices(look: Callable[..., Inventory], fill: float, code: str) -> None:
    found = look(LLAMA, drawn(LLAMA) | {Q1: torch.full((64, 64), fill)})
    assert one(found, code, "warning").tensor == Q1


def test_a_table_of_zeros_is_said_once(look: Callable[..., Inventory]) -> None:
    assert one(look(LLAMA, drawn(LLAMA) | {EMBED: torch.zeros(96, 64)}), "zero-tensor", "warning").tensor == EMBED


def test_biases_may_be_zero(look: Callable[..., Inventory]) -> None:
    config = {**LLAMA, "attention_bias": True}
    tensors = drawn(config)
    biases = [n for n in tensors if n.endswith(".bias")]
    assert biases
    assert look(config, {n: torch.zeros_like(t) if n in biases else t for n, t in tensors.items()}).findings == ()


def test_a_nan_among_equal_values(look: Callable[..., Inventory]) -> None:
    x = torch.full((64, 64), 0.25)
    x[3, 4] = math.nan
    one(look(LLAMA, drawn(LLAMA) | {Q1: x}), "nan-values", "error")


def test_beyond_fp16(look: Callable[..., Inventory]) -> None:
    tensors = drawn(LLAMA)
    tensors[Q1][0, 0] = 65504.0
    assert look(LLAMA, tensors).findings == ()
    tensors[Q1][0, 0], tensors[K1][0, 0] = 70000.0, -80000.0
    f = one(look(LLAMA, tensors), "beyond-fp16", "note")
    assert f.tensor == K1
    assert "2 tensors" in f.message
    assert "80,000" in f.message


# --- norms


def test_a_norm_that_was_not_loaded(look: Callable[..., Inventory]) -> None:
    for name, config, initial in ((NORMS[2], LLAMA, 1.0), (NORM, LLAMA, 1.0), (NORMS[3], GEMMA, 0.0)):
        f = one(look(config, drawn(config) | {name: torch.full((64,), initial)}), "norm-not-loaded", "warning")
        assert f.tensor == name
        assert f"weights are {initial:g}," in f.message


def test_norms_of_one_value(look: Callable[..., Inventory]) -> None:
    """A model as it is made, before any training."""
    tensors = {n: torch.ones_like(t) if "norm" in n else t for n, t in drawn(LLAMA).items()}
    assert "7 norms" in one(look(LLAMA, tensors), "norms-constant", "note").message


@pytest.mark.parametrize("by", [-1.0, None])
def test_factors_stored_less_one(look: Callable[..., Inventory], by: float | None) -> None:
    """Where the description multiplies by what is stored; None: all zero, as such a model starts."""
    tensors = {n: t if "norm" not in n else torch.zeros_like(t) if by is None else t + by
               for n, t in drawn(LLAMA).items()}
    found = look(LLAMA, tensors)
    f = next(f for f in found.findings if f.code == "norm-offset")
    assert f.level == "warning"
    assert "around 1" in f.message
    assert set(codes(found)) == {"norm-offset"} | ({"norms-constant"} if by is None else set())


def test_norms_of_heads_and_biases_of_norms(look: Callable[..., Inventory]) -> None:
    """One finding for all norms in a matrix; biases are no factors."""
    config = json.loads((GOLDEN / "cohere-qk-norm" / "config.json").read_text())
    tensors = drawn(config)
    name = "model.layers.0.self_attn.q_norm.weight"
    before = [f for f in look(config, tensors).findings if f.level != "note"]
    assert tensors[name].dim() == 2
    after = [f for f in look(config, tensors | {name: torch.ones_like(tensors[name])}).findings if f.level != "note"]
    assert [f.code for f in before] == []
    assert [(f.code, f.tensor) for f in after] == [("norm-not-loaded", name)]
    assert f"of entry 0 and {len(tensors[name]) - 1} more are 1," in after[0].message
    config = json.loads((GOLDEN / "gpt2" / "config.json").read_text()) | {"torch_dtype": "float32"}
    tensors = {n: 1 + torch.randn(t.shape) * 0.3 if "ln_" in n else t for n, t in drawn(config).items()}
    found = look(config, tensors | {"transformer.h.0.ln_1.bias": torch.zeros(tensors[
        "transformer.h.0.ln_1.bias"].shape)})
    assert found.findings == ()
    means = [float(t.double().mean()) for n, t in tensors.items() if "ln_" in n and n.endswith("weight")]
    assert found.norm_mean == pytest.approx((min(means), sorted(means)[len(means) // 2], max(means)))


def test_factors_where_one_less_is_due(look: Callable[..., Inventory]) -> None:
    assert look(GEMMA).findings == ()
    far = {n: t.abs() + 4 if "norm" in n else t for n, t in drawn(GEMMA).items()}
    assert look(GEMMA, far).findings == ()  # as trained ones may be
    shifted = {n: t + 1 if "norm" in n else t for n, t in drawn(GEMMA).items()}
    # 1 +- 0.1: drawn wider, a value below 0 is chance
    shifted |= {n: 1 + (shifted[n] - 1) / 3 for n in shifted if "norm" in n}
    assert "around 0" in one(look(GEMMA, shifted), "norm-offset", "warning").message


# --- what is there twice


def test_a_tensor_that_is_anothers(look: Callable[..., Inventory]) -> None:
    tensors = drawn(LLAMA)
    tensors[Q1] = tensors["model.layers.0.self_attn.q_proj.weight"]
    f = one(look(LLAMA, tensors), "duplicate-tensor", "warning")
    assert f.tensor == Q1
    assert "layers.0.self_attn.q_proj.weight" in f.message


def test_a_layer_that_is_anothers(look: Callable[..., Inventory]) -> None:
    """One finding, whatever the number of its tensors; norms that are all ones do not count."""
    tensors = drawn(LLAMA)
    layer = [n for n in tensors if ".layers.2." in n]
    tensors |= {n: tensors[n.replace(".2.", ".0.")] for n in layer}
    f = one(look(LLAMA, tensors), "duplicate-tensor", "warning")
    assert f"{len(layer) - 1} more tensors" in f.message
    same = drawn(LLAMA)
    same |= {n: torch.ones(64) for n in same if "norm" in n}
    assert codes(look(LLAMA, same)) == ["norms-constant"]


def test_rows_of_tables(look: Callable[..., Inventory]) -> None:
    tensors = drawn(LLAMA)
    tensors[EMBED][[3, 17, 95]] = 0.0
    tensors[HEAD][40 : 40 + HANDFUL] = tensors[HEAD][2]
    f = one(look(LLAMA, tensors), "zero-rows", "note")
    assert "3 of 96 rows of the token embedding are zero, the first is row 3" in f.message
    tensors[HEAD][80] = tensors[HEAD][2]
    found = look(LLAMA, tensors)
    said = {f.code: f.message for f in found.findings}
    tensors[EMBED][20] = -1.0
    tensors[EMBED][20, 5] = 0.0
    tensors[EMBED][60 : 60 + 2 * HANDFUL] = 0.0
    again = {f.code: f.message for f in look(LLAMA, tensors).findings}
    assert f"{2 * HANDFUL + 3} of 96 rows of the token embedding are zero" in again["zero-rows"]
    assert again["duplicate-rows"] == said["duplicate-rows"]
    assert set(said) == {"zero-rows", "duplicate-rows"}
    assert f"{HANDFUL + 1} of 96 rows of the head repeat another, the first is row 40 as row 2" in (
        said["duplicate-rows"])


def test_rows_in_later_blocks(look: Callable[..., Inventory]) -> None:
    config = {**LLAMA, "vocab_size": 9000}
    tensors = drawn(config)
    tensors[EMBED][[5000, 8999]] = 0.0
    tensors[EMBED][8000 : 8000 + HANDFUL + 1] = tensors[EMBED][1]
    found = look(config, tensors)
    assert codes(found) == ["zero-rows", "duplicate-rows"]
    assert "2 of 9,000 rows of the token embedding are zero, the first is row 5,000" in found.findings[0].message
    assert "row 8,000 as row 1" in found.findings[1].message


# --- the head


def test_head(look: Callable[..., Inventory]) -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    tensors = drawn(LLAMA)
    without = {n: t for n, t in tensors.items() if n != HEAD}
    assert (look(tied, without).head, look(LLAMA, tensors).head) == ("tied", "untied")
    found = look(tied, without | {HEAD: tensors[EMBED]})
    assert (found.head, found.findings) == ("tied and stored, equal", ())
    found = look(tied, tensors)
    assert found.head == "tied and stored, different"
    assert one(found, "weights-head-differs", "warning").tensor == HEAD
    found = look(LLAMA, without | {HEAD: tensors[EMBED]})
    assert found.head == "untied"
    assert one(found, "head-equals-embedding", "note").tensor == HEAD


def test_a_head_that_is_the_embedding_but_for_its_end(look: Callable[..., Inventory]) -> None:
    config = {**LLAMA, "vocab_size": 9000}
    tensors = drawn(config)
    tensors[HEAD] = tensors[EMBED].clone()
    assert codes(look(config, tensors)) == ["head-equals-embedding"]
    tensors[HEAD][8999, 63] += 1
    assert look(config, tensors).findings == ()


@pytest.mark.parametrize("equal", [True, False])
def test_a_stored_head_in_another_type(look: Callable[..., Inventory], equal: bool) -> None:
    tensors = {n: t.to(torch.bfloat16) for n, t in drawn(LLAMA).items()}
    tensors[HEAD] = (tensors[EMBED] if equal else tensors[HEAD]).float()
    found = look({**LLAMA, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}, tensors)
    assert found.head == f"tied and stored, {'equal' if equal else 'different'}"
    assert ("weights-head-differs" in codes(found)) is not equal


# --- types


def test_dtypes(look: Callable[..., Inventory]) -> None:
    tensors = {n: t.to(torch.bfloat16) for n, t in drawn(LLAMA).items()}
    assert "config says fp32, most of the weights are bf16" in one(look(LLAMA, tensors), "dtype-differs",
                                                                   "warning").message
    said = {**LLAMA, "torch_dtype": "bfloat16"}
    assert look(said, tensors).findings == ()
    found = look(said, tensors | {NORM: tensors[NORM].float()})
    assert "64 elements in F32" in one(found, "mixed-dtypes", "note").message
    assert found.dtypes == (("BF16", sum(t.numel() for t in tensors.values()) - 64), ("F32", 64))


def test_a_kind_of_finding_is_counted_beyond_some(look: Callable[..., Inventory]) -> None:
    config = {**LLAMA, "num_hidden_layers": 4}
    tensors = {n: torch.full_like(t, math.nan) for n, t in drawn(config).items()}
    found = look(config, tensors)
    shown = [f for f in found.findings if f.code == "nan-values"]
    assert len(shown) == SHOWN + 1
    assert f"and {len(tensors) - SHOWN} more" in shown[-1].message
    assert found.nan == sum(t.numel() for t in tensors.values())


# --- other layouts


def test_an_expert_in_a_stack(look: Callable[..., Inventory], tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "granitemoe" / "config.json").read_text())
    tensors = drawn(config)
    name = "model.layers.1.block_sparse_moe.output_linear.weight"
    before = look(config, tensors)
    assert [f for f in before.findings if f.level != "note"] == []
    tensors[name][1] = 0.0
    tensors[name][2] = tensors[name][0]
    tensors[name][3, 4, 5] = math.nan
    found = look(config, tensors)
    assert codes(found)[:3] == ["nan-values", "zero-tensor", "duplicate-tensor"]
    assert "at [3, 4, 5] (" in found.findings[0].message
    assert found.findings[0].message.endswith("of entry 3)")
    assert found.findings[1].message.startswith("entry 1:")
    assert "entry 0" in found.findings[2].message
    assert {f.tensor for f in found.findings[:3]} == {name}


def test_ranks(look: Callable[..., Inventory], written: Any, tmp_path: Path) -> None:
    """An index in a slice is told as that of the whole matrix, cut along either axis."""
    config = {**LLAMA, "num_attention_heads": 4}
    tensors = drawn(config)
    state = written.meta(tensors, 4, 2)
    wo, w1 = "layers.1.attention.wo.weight", "layers.2.feed_forward.w1.weight"
    state[wo][9, 40] = state[w1][70, 3] = math.nan
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "params.json").write_text(json.dumps({
        "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96, "hidden_dim": 96, "norm_eps": 1e-5,
        "rope_theta": 10000.0}))
    for n, rank in enumerate(written.ranks(state, 2, 1)):
        torch.save(rank, tmp_path / "m" / f"consolidated.{n:02d}.pth")
    found = look(path=tmp_path / "m")
    assert found.layout == "meta"
    assert {f.tensor: f.message.split("at ")[1] for f in found.findings} == {
        wo: f"[9, 40] (value {9 * 64 + 40:,})", w1: f"[70, 3] (value {70 * 64 + 3:,})"}
    norms = [float(t.double().mean()) for n, t in tensors.items() if "norm" in n]
    assert found.norm_mean is not None
    assert (found.norm_mean[0], found.norm_mean[2]) == pytest.approx((min(norms), max(norms)))


@pytest.mark.parametrize("plus_one", [True, False])
def test_gguf_holds_the_factors_of_a_gemma(look: Callable[..., Inventory], written: Any, tmp_path: Path,
                                           plus_one: bool) -> None:
    gguf = pytest.importorskip("gguf")
    which = gguf.MODEL_ARCH.GEMMA
    arrays = written.gguf_arrays(drawn(GEMMA), GEMMA, which, permuted=False, plus_one=plus_one)
    path = written.write_gguf(tmp_path / "m.gguf", which, written.ggufs().gemma, GEMMA, arrays)
    found = look(path=path)
    if plus_one:
        assert found.findings == ()
    else:
        assert "around 1" in one(found, "norm-offset", "warning").message


def test_quantised(look: Callable[..., Inventory], written: Any, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    which, kind = gguf.MODEL_ARCH.LLAMA, gguf.GGMLQuantizationType.Q8_0
    config = {**LLAMA, "num_key_value_heads": 4}
    arrays = written.gguf_arrays(drawn(config), config, which, permuted=True, plus_one=False)
    down, up = "blk.2.ffn_down.weight", "blk.0.ffn_up.weight"
    blocks = {n: gguf.quants.quantize(arrays[n], kind) for n in (down, up, "token_embd.weight")}
    types = dict.fromkeys(blocks, kind)

    def write(name: str) -> Path:
        path: Path = written.write_gguf(tmp_path / name, which, written.ggufs().llama, config, arrays | blocks, types)
        return path

    assert look(path=write("clean.gguf")).findings == ()
    blocks[down][7, 34 : 36] = np.frombuffer(np.float16(np.inf).tobytes(), np.uint8)  # the scale of its second block
    blocks[down][7, 36], blocks[down][7, 37:68] = 0, 1
    blocks[up][:] = 0
    blocks["token_embd.weight"][5] = 0
    found = look(path=write("odd.gguf"))
    assert [(f.code, f.tensor) for f in found.findings] == [
        ("nan-values", down), ("inf-values", down), ("zero-tensor", up), ("zero-rows", "token_embd.weight")]
    assert "1 of 6,144 values is nan, the first at [7, 32]" in found.findings[0].message
    assert "31 of 6,144 values are infinite, the first at [7, 33]" in found.findings[1].message
    assert "the first is row 5" in found.findings[3].message


@pytest.mark.parametrize("kind", QUANTISED)
def test_scales_decide_what_is_finite(kind: str) -> None:
    """Against the package that unpacks: a NaN in any scale is one in the values, and no scale at all is zero."""
    pytest.importorskip("gguf")
    one_block = next(t for t in GGML_TYPES.values() if t.name == kind)
    g = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (6, one_block.block_bytes), generator=g, dtype=torch.uint8)
    for at in SCALES[kind]:
        raw[:, at : at + 2] = torch.rand(6, 1, generator=g).half().view(torch.uint8)
    assert not scan(buffer(raw), kind, lambda _: None).nan
    for at in SCALES[kind]:
        bad = raw.clone()
        bad[4, at : at + 2] = torch.tensor([math.nan]).half().view(torch.uint8)
        facts = scan(buffer(bad), kind, lambda _: None)
        want = unpacked(bad.view(-1), kind, (6, one_block.block)).isnan()
        assert want.any()
        assert (facts.nan, facts.first_nan) == (int(want.sum()), int(want.view(-1).to(torch.uint8).argmax()))
        assert facts.elements == want.numel()
    for at in SCALES[kind]:
        raw[:, at : at + 2] = 0
    assert scan(buffer(raw), kind, lambda _: None).zero
    assert not unpacked(raw.view(-1), kind, (6, one_block.block)).any()


def test_scales_in_later_blocks() -> None:
    pytest.importorskip("gguf")
    raw = torch.zeros(BLOCK // 34 + 100, 34, dtype=torch.uint8)
    raw[-2, :2] = torch.tensor([math.nan]).half().view(torch.uint8)
    facts = scan(buffer(raw), "Q8_0", lambda _: None)
    assert (facts.nan, facts.first_nan) == (32, (len(raw) - 2) * 32)


def test_every_type_that_is_run_is_looked_at() -> None:
    assert set(SCALES) == set(QUANTISED)
    assert set(DTYPES) < set(scanning.READ)
    assert scan(memoryview(bytes(18)), "IQ4_NL", lambda _: None).read is False


def test_eight_bits() -> None:
    x = torch.tensor([0.5, -2.0, math.nan, 3.0]).to(torch.float8_e4m3fn)
    facts = scan(buffer(x), "F8_E4M3", lambda _: None)
    assert (facts.nan, facts.first_nan, facts.least, facts.largest) == (1, 2, -2.0, 3.0)


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A tensor of 256 blocks takes a few of them, and what a table's rows take is eight bytes each."""
    from llamactl.checkpoint.copying import Mapped

    file = tmp_path / "zeros"
    with file.open("wb") as f:
        f.truncate(256 * BLOCK)
    with Mapped({str(file): 256 * BLOCK}).window(str(file), 0, 256 * BLOCK) as data:
        before = anonymous()
        facts = scan(data, "F32", watch := Watch(), rows=1 << 16)
    assert facts.zero_rows == (1 << 16, 0)
    assert watch.most - before < 16 * BLOCK


class Watch:
    """The most anonymous memory that was seen after a block."""

    most = 0

    def __call__(self, nbytes: int) -> None:
        self.most = max(self.most, anonymous())


def anonymous() -> int:
    if sys.platform != "linux":
        pytest.skip("anonymous memory is read from /proc")
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("RssAnon")) << 10


def test_packed_agrees_with_unpacked_rows() -> None:
    """Rows of quantised tables that repeat: told by their bytes."""
    pytest.importorskip("gguf")
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    x[9:19] = x[1]
    facts = scan(buffer(packed(x, "Q8_0")), "Q8_0", lambda _: None, rows=20)
    assert facts.twins == (10, (1, 9))
    assert facts.zero_rows is None
