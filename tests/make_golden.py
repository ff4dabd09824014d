"""Make a family's goldens with transformers, an implementation independent of ours.

    python tests/make_golden.py FAMILY [FAMILY...] | --all

tests/golden/<name>/config.json is written by hand (or, if absent, from the family's defaults at a small size); this
script adds what transformers makes of it: header.json (names, shapes and kinds of the checkpoint it saves, and the
cache it keeps) and logits.json (fp32 logits of fixed tokens). Dimensions are pairwise different and weights drawn with
a large spread, because the library's own initialisation (std 0.02, norm weights 1) hides swapped or unloaded tensors.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightRenaming

GOLDEN = Path(__file__).parent / "golden"
TOKENS = 24  # past every test model's window of 8
SMALL = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "dtype": "float32",
}


def small_config(model_type: str) -> dict[str, Any]:
    """A first config.json for a new family: its own defaults at a small size, to be edited by hand."""
    known = AutoConfig.for_model(model_type).to_dict()
    return {"model_type": model_type, **{k: v for k, v in SMALL.items() if k in known or k == "dtype"}}


SAME = {"kimi_k2": "deepseek_v3"}  # transformers reads the one as the other, where it stands inside Kimi K2.5


def build(folder: Path) -> torch.nn.Module:
    """The model of folder/config.json with weights drawn from a fixed seed, in fp32 on the CPU."""
    data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**(data | {"model_type": SAME.get(data["model_type"], data["model_type"])}))
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    torch.manual_seed(0)
    if data["model_type"] == "gemma3n":  # its picture tower is timm's, so both towers are left out; the rest is its own
        text_only()
    # Falcon's eager path adds ALiBi twice (transformers 5.24), once in the mask and once to the scores; sdpa does not.
    how = "sdpa" if data["model_type"] == "falcon" and data.get("alibi") else "eager"
    model = auto.from_config(config, attn_implementation=how).to(torch.float32).eval()
    draw(model)
    as_published(model)
    return model


def text_only() -> None:
    """Let transformers build Gemma 3n with empty towers."""
    from transformers.models.gemma3n import modeling_gemma3n as code

    class Auto:
        @staticmethod
        def from_config(config: Any, **kwargs: Any) -> torch.nn.Module:
            whole = transformers.AutoModel.from_config
            return whole(config, **kwargs) if "Text" in type(config).__name__ else torch.nn.Module()

    code.AutoModel = Auto


def as_published(model: torch.nn.Module) -> None:
    """Let save_pretrained undo every conversion of a published file; by itself it leaves out those on a fresh model."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    if not hasattr(model.config, "vision_config"):  # text alone need not stand where it stands beside a tower
        conversions = [c for c in conversions if not isinstance(c, PrefixChange)]
    if type(model).__name__.startswith("Qwen3_5"):  # published with stacked experts; text alone has no prefix
        alone = model.config.model_type.endswith("_text")
        model._weight_conversions = [c for c in conversions if alone and not isinstance(c, PrefixChange)]
        return
    for conversion in conversions:
        for op in getattr(conversion, "operations", ()):
            if hasattr(op, "check_dims"):
                op.check_dims = False
    if "Kimi_K25" in type(model).__name__:  # three of its renamings have no way back of their own
        conversions = [c for c in conversions if c.source_patterns != ["blocks"]] + [
            WeightRenaming(source_patterns=old, target_patterns=new) for old, new in (
                ("vision_tower.blocks", "vision_tower.layers"),
                ("mm_projector.pre_norm", "model.mm_projector.pre_norm"),
                ("vision_tower.patch_embed.proj", "model.vision_tower.patch_embed.proj"))]
    model._weight_conversions = conversions or None


def draw(model: torch.nn.Module) -> None:
    """Matrices from N(0, 0.3 / fan-in^0.5 x 4), norm weights 1 +- 0.3, biases and sinks N(0, 0.3)."""
    generator = torch.Generator().manual_seed(1)
    for name, p in sorted(model.named_parameters()):
        with torch.no_grad():
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() >= 2:
                p.copy_(noise * (1.2 / math.sqrt(p.shape[-1])))
            elif "norm" in name or "ln_" in name or "layernorm" in name:
                p.copy_((0.0 if float(p.mean()) == 0 else 1.0) + 0.3 * noise)
            else:
                p.copy_(0.3 * noise)
    for name, b in model.named_buffers():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            b.copy_(0.3 * torch.randn(b.shape, generator=generator))
        elif name.endswith(("layer_scalar", "std_scale", "std_bias")):
            b.copy_(1 + 0.3 * torch.randn(b.shape, generator=generator))
        elif name.endswith(("put_min", "put_max")):  # bounds that cut, also the small numbers behind a gate
            bound = (0.5 + 0.1 * torch.rand(b.shape, generator=generator)) * (0.08 if "down_proj" in name else 1.0)
            b.copy_(bound if name.endswith("max") else -bound)


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Without parameters that no gradient reaches: a buffer by another name (ERNIE's load-balancing bias)."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def header(model: torch.nn.Module) -> dict[str, Any]:
    """{name: {shape, kind}} of the checkpoint that save_pretrained writes, under its published names."""
    parameters = {p.data_ptr() for p in model.parameters()}
    saved = model.state_dict().keys()
    buffers = {n.rsplit(".", 1)[-1] for n, b in model.named_buffers() if n in saved and b.data_ptr() not in parameters}
    buffers |= {n.rsplit(".", 1)[-1] for n in saved & dict(model.named_parameters()).keys() - trained(model).keys()}
    with tempfile.TemporaryDirectory() as tmp:
        model.save_pretrained(tmp)
        out = {}
        for file in sorted(Path(tmp).glob("*.safetensors")):
            with safe_open(file, "pt") as f:
                for name in f.keys():  # noqa: SIM118  a safe_open handle is no dict
                    kind = "buffer" if name.rsplit(".", 1)[-1] in buffers else "param"
                    out[name] = {"shape": list(f.get_slice(name).get_shape()), "kind": kind}
    return dict(sorted(out.items()))


def decoder(model: torch.nn.Module) -> torch.nn.Module:
    """The language model inside a vision-language one, where it has a head of its own (Llama 4)."""
    inner = getattr(model, "language_model", None)
    return inner if inner is not None and hasattr(inner, "lm_head") else model


def cache(model: torch.nn.Module, ids: torch.Tensor) -> list[dict[str, Any]]:
    """Shapes of the key and value (or state) tensors that transformers keeps per layer after `ids`."""
    past = DynamicCache(config=model.config.get_text_config())
    word = "cache" if "cache" in inspect.signature(decoder(model).forward).parameters else "past_key_values"
    with torch.no_grad():
        decoder(model)(ids, **{word: past}, use_cache=True)
    return [kept(layer) for layer in past.layers]


def kept(layer: Any) -> dict[str, Any]:
    """Keys and values of one layer, or the states of a mixer that keeps no more, however long the text."""
    if getattr(layer, "conv_states", None) is not None:
        states = (*layer.conv_states.values(), *layer.recurrent_states.values())
        return {"states": [list(s.shape) for s in states if s is not None]}
    if layer.keys is None:
        return {}
    more = getattr(layer, "indexer_keys", None)
    return {"k": list(layer.keys.shape), "v": list(layer.values.shape)} | (
        {} if more is None else {"indexer": list(more.shape)})


def logits(model: torch.nn.Module, ids: torch.Tensor) -> list[list[float]]:
    with torch.no_grad():
        out: list[list[float]] = decoder(model)(ids, use_cache=False).logits[0].double().tolist()
    return [[float(f"{x:.7g}") for x in row] for row in out]


def make(name: str) -> None:
    folder = GOLDEN / name
    folder.mkdir(exist_ok=True, parents=True)
    config = folder / "config.json"
    if not config.exists():
        config.write_text(json.dumps(small_config(name), indent=1) + "\n", encoding="utf-8")
        print(f"{config}: written from the family's defaults; make its dimensions pairwise different, then run again")
    model = build(folder)
    vocab = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocab - 1, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    params = sum(p.numel() for p in {p.data_ptr(): p for p in trained(model).values()}.values())
    made = {"transformers": transformers.__version__, "total": params, "tokens": TOKENS, "tensors": header(model),
            "cache": cache(model, ids)}
    text = json.dumps(made, indent=None, separators=(",", ":")).replace('},"', '},\n"')
    (folder / "header.json").write_text(text + "\n", encoding="utf-8")
    result = {"transformers": transformers.__version__, "ids": ids[0].tolist(), "logits": logits(model, ids)}
    text = json.dumps(result, separators=(",", ":")).replace("],[", "],\n[")
    (folder / "logits.json").write_text(text + "\n", encoding="utf-8")
    print(f"{name}: {params:,} parameters, {len(made['tensors'])} tensors")


def main(names: list[str]) -> int:
    if not names:
        print(__doc__)
        return 2
    if names == ["--all"]:
        names = sorted(p.name for p in GOLDEN.iterdir() if (p / "config.json").exists())
    for name in names:
        make(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
