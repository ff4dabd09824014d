"""Real published configs and the bundled presets against transformers on the meta device, and against known totals.

transformers is an oracle, not the truth. On the types that llamactl knows it agrees everywhere it is asked here; where
it is known to differ, the difference is not about parameters: Falcon's expanded KV heads (test_golden.py) and the tie
of Mistral-Small-3.1, whose file is silent (test_vision_language.py).
"""

from __future__ import annotations

import json
import re
import warnings
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Model
from llamactl.spec.rope import Rope

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT.parent / "shared" / "configs"
FOLDERS = sorted(p.name for p in CONFIGS.iterdir()) if CONFIGS.is_dir() else []


PRESETS = {p.stem: p for p in sorted((ROOT / "presets" / "models").glob("*.yaml"))}


@lru_cache
def preset(name: str) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(PRESETS[name].read_text(encoding="utf-8"))
    return data


@lru_cache
def config(name: str) -> dict[str, Any]:
    """The config of a real model's folder or of `preset:NAME`."""
    if name.startswith("preset:"):
        return dict(preset(name.removeprefix("preset:"))["config"])
    return dict(json.loads((CONFIGS / name / "config.json").read_text(encoding="utf-8")))


def foreign(name: str) -> bool:
    """A file that transformers does not know, or takes for another: OLMo's own package has its type, not its keys."""
    data = config(name)
    by_hand = json.loads((Path(__file__).parent / "by_hand.json").read_text(encoding="utf-8"))
    return data.get("model_type") in by_hand or (data.get("model_type") == "olmo" and "d_model" in data)


DESCRIBED = [name for name in (*FOLDERS, *(f"preset:{p}" for p in PRESETS))
             if config(name).get("model_type") in arch.families()]
KNOWN = [name for name in DESCRIBED if not foreign(name)]


@lru_cache
def oracle(transformers: ModuleType, name: str) -> Any:
    """The model that transformers makes of the file, without memory behind it."""
    import torch

    data = {k: v for k, v in config(name).items() if k not in ("quantization_config", "auto_map")}
    data["model_type"] = {"kimi_k2": "deepseek_v3"}.get(data["model_type"], data["model_type"])  # as in Kimi K2.5
    made = transformers.AutoConfig.for_model(**data)
    auto = transformers.AutoModelForCausalLM
    if hasattr(made, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return auto.from_config(made)


# What a parameter of transformers is counted under; the first that matches its name. Fused ones are split below.
COMPONENTS = (
    (r"visual\.(deepstack_)?merger", "projector"), (r"\.visual\.", "vision"),
    (r"vision_(tower|model)\.", "vision"), (r"multi_modal_projector|\.mm_projector|\.embed_vision", "projector"),
    (r"word_embeddings_layernorm", "norms"), (r"norm_attn_norm\.attn\.out_proj", "attention.o"), (r"Wqkv", "qkv"),
    (r"embed_positions", "position_embedding"), (r"decoder\.project_(in|out)", "other"),
    (r"embed_tokens|wte|embed_in|word_embeddings", "token_embedding"), (r"wpe", "position_embedding"),
    (r"lm_head|embed_out", "lm_head"), (r"norm|\.ln_", "norms"), (r"\.embeddings\.weight", "token_embedding"),
    (r"\.(mamba|linear_attn|conv)\.|mixer\.(in_proj|conv1d|A_log|D|dt_bias|out_proj)", "state_space"),
    (r"cross_attn_(attn|mlp)_gate", "other"), (r"\.indexer\.", "attention.other"),
    (r"c_attn|qkv_proj|query_key_value", "qkv"), (r"\.kv_b_proj", "kv_b"), (r"\.kv_a_proj|sinks", "attention.other"),
    (r"\.q(_a|_b)?_proj", "attention.q"), (r"\.k_proj", "attention.k"), (r"\.v_proj", "attention.v"),
    (r"(self|cross)_attn\.(o_proj|dense)|attn\.(c_proj|out_proj)|attention\.dense|mixer\.o_proj", "attention.o"),
    (r"\.experts\.", "feed_forward.routed_experts"), (r"shared_expert", "feed_forward.shared_experts"),
    (r"\.router\.|(mlp|block_sparse_moe|mixer|feed_forward)\.gate\.", "feed_forward.router"),
    (r"gate_up_proj", "gate_up"),
    (r"gate_proj", "feed_forward.gate"), (r"up_proj|c_fc|fc1|fc_in|dense_h_to_4h", "feed_forward.up"),
    (r"down_proj|mlp\.c_proj|fc2|fc_out|dense_4h_to_h", "feed_forward.down"),
)


def counted(hf: Any) -> Counter[str]:
    """Parameters of a transformers model by component, from their names and the config's head counts."""
    text = hf.config.get_text_config()
    heads = text.num_attention_heads
    kv = heads  # Gemma 4 has a count for each layer, and nothing fused
    if text.model_type != "gemma4_text":
        kv = getattr(text, "num_key_value_heads", None) or heads
    if text.model_type == "falcon":
        kv = text.num_kv_heads if text.new_decoder_architecture or not text.multi_query else 1
    out: Counter[str] = Counter()
    for name, p in hf.named_parameters():
        component = next(c for pattern, c in COMPONENTS if re.search(pattern, name))
        if getattr(text, "enable_moe_block", False) and ".layers." in name and ".mlp." in name:
            component = "vision" if component == "vision" else "feed_forward.shared_experts"  # Gemma 4's runs for all
        shares = {component: 1}
        if component == "qkv":
            shares = {"attention.q": heads, "attention.k": kv, "attention.v": kv}
        if component == "kv_b":
            shares = {"attention.k": text.qk_nope_head_dim, "attention.v": text.v_head_dim}
        if component == "gate_up":
            shares = {"feed_forward.gate": 1, "feed_forward.up": 1}
        for c, share in shares.items():
            part, left = divmod(p.numel() * share, sum(shares.values()))
            assert left == 0
            out[c] += part
    return out


def by_role(model: Model) -> Counter[str]:
    """The same from our parts."""
    out: Counter[str] = Counter()
    for leaf in model.outer_leaves():
        out[leaf.role] += leaf.elements * (leaf.kind == "param")
    for layer, n in model.distinct_layers():
        for leaf in layer.leaves():
            out[leaf.role] += n * leaf.elements * (leaf.kind == "param")
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_parameters(make_golden: ModuleType, name: str) -> None:
    hf = oracle(make_golden.transformers, name)
    model = arch.describe(config(name), name)
    assert model.total() == sum(p.numel() for p in set(make_golden.trained(hf).values()))
    theirs = counted(hf)
    assert {k: v for k, v in by_role(model).items() if v} == {k: v for k, v in theirs.items() if v}


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_windows(make_golden: ModuleType, name: str) -> None:
    """Which layers see how far: layer_types where transformers has it, else one window for all or none."""
    text = oracle(make_golden.transformers, name).config.get_text_config()
    model = arch.describe(config(name), name)
    window = getattr(text, "sliding_window", None)
    everywhere = "sliding_attention" if window else "full_attention"
    words = getattr(text, "layer_types", None) or [everywhere] * text.num_hidden_layers
    reach = {"full_attention": (None, None), "indexed_attention": (None, None),
             "sliding_attention": ("sliding", window),
             "chunked_attention": ("chunked", getattr(text, "attention_chunk_size", None))}
    theirs = [reach.get(word, word) for word in words]
    absent = {"linear_attention", "conv", "moe", "mlp"}  # mixers and blocks that keep nothing for each token
    for layer, seen in zip(model.layers, theirs, strict=True):
        if layer.attn is None:
            assert seen in absent
            continue
        cache = layer.attn.cache()
        assert (cache.kind if cache.window else None, cache.window) == seen


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_rope(make_golden: ModuleType, name: str) -> None:
    """Base, scheme, factor and rotated share, layer by layer."""
    text = oracle(make_golden.transformers, name).config.get_text_config()
    model = arch.describe(config(name), name)
    given = getattr(text, "rope_parameters", None) or {}
    if not given and hasattr(text, "rotary_dim"):  # GPT-J has one fixed rotation
        share = text.rotary_dim / (text.hidden_size // text.num_attention_heads)
        given = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": share}
    if given and hasattr(text, "attn_config"):  # of DBRX's file transformers reads the base there, and drops it
        given = {**given, "rope_theta": text.attn_config.rope_theta}
    words = getattr(text, "layer_types", None) or ["full_attention"] * model.n_layers
    turned = getattr(text, "no_rope_layers", None) or [bool(given)] * model.n_layers  # 1: rotated
    for layer, word, turns in zip(model.layers, words, turned, strict=True):
        theirs = given.get(word, given)
        if layer.attn is None:
            continue
        ours = layer.attn.rope
        assert (ours is None) == (not turns or getattr(layer.attn, "cross", False))
        if ours is None:
            continue
        assert isinstance(ours, Rope)
        alpha = theirs.get("alpha")  # Hunyuan's word for a base that is stretched once and for all
        assert ours.theta == theirs["rope_theta"] * (alpha ** (ours.dim / (ours.dim - 2)) if alpha else 1)
        scheme = "proportional" if ours.span else ours.scaling.kind if ours.scaling else "default"
        assert scheme == ("default" if alpha else theirs["rope_type"])
        if ours.scaling and ours.scaling.factor:
            assert ours.scaling.factor == theirs["factor"]
        whole = layer.attn.qk_rope if isinstance(layer.attn, LatentAttention) else layer.attn.head_dim
        share = 1.0 if isinstance(layer.attn, LatentAttention) else theirs.get("partial_rotary_factor") or 1.0
        assert ours.dim == int(whole * share)


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - set(DESCRIBED)))
def test_unknown_types_are_refused_with_near_ones(name: str) -> None:
    data = config(name)
    with pytest.raises(InputRefused) as caught:
        arch.describe(data, f"{name}/config.json")
    error = caught.value
    assert error.exit_code == 3
    assert error.code == ("config-remote-code" if "auto_map" in data else "config-model-type")
    near = error.message.rpartition("nearest known: ")[2].split(", ")
    assert near
    assert set(near) <= set(arch.families())
    assert repr(data["model_type"]) in error.message
    assert "\n" not in error.line()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_their_published_total(name: str) -> None:
    model = arch.describe(preset(name)["config"], name)
    published = preset(name).get("published", {}).get("total")
    if published is not None:
        assert model.total() == published
    assert model.notes == ()
    assert preset(name)["name"] == name


def test_many_presets_have_a_published_total() -> None:
    assert sum("total" in preset(name).get("published", {}) for name in PRESETS) > 50


@pytest.mark.parametrize(("name", "total"), [
    ("gpt2", 124_439_808), ("smollm2-135m", 134_515_008), ("llama-2-7b", 6_738_415_616), ("llama-3-8b", 8_030_261_248),
    ("llama-3.1-405b", 405_853_388_800), ("mistral-7b-v0.1", 7_241_732_096), ("gemma-2-9b", 9_241_705_984),
    ("mixtral-8x7b", 46_702_792_704), ("qwen3-30b-a3b", 30_532_122_624), ("gpt-oss-20b", 20_914_757_184),
    ("deepseek-v3", 671_026_404_352),
])
def test_totals_known_by_two_methods(name: str, total: int) -> None:
    """Written here a second time: a preset's own number cannot vouch for its config."""
    assert arch.describe(preset(name)["config"], name).total() == total
