"""Llama 3.2 Vision's tower: tiles of a picture, a first stack of blocks and a gated second one, as a section."""

from __future__ import annotations

from collections.abc import Iterator

from llamactl.arch._names import modules
from llamactl.arch._towers import depth, layer_norm
from llamactl.arch._vision import patches, section
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Section
from llamactl.spec.naming import rule
from llamactl.spec.parts import Leaf, linear, under

V = "vision_model."
BLOCK = {f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"} | {
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}
STACKS = {"layers.{i}.": "transformer.layers.{i}.", "global.{i}.": "global_transformer.layers.{i}."}
NAMES = (
    *modules({f"vision.{c}": f"{V}{s}" for c, s in {
        "patch": "patch_embedding", "before.table": "pre_tile_positional_embedding.embedding",
        "tiles": "gated_positional_embedding.tile_embedding", "pre_norm": "layernorm_pre", "norm": "layernorm_post",
        "after.table": "post_tile_positional_embedding.embedding",
    }.items()} | {f"vision.{a}{c}": f"{V}{b}{s}" for a, b in STACKS.items() for c, s in BLOCK.items()}),
    *(rule(f"{V}{s}", f"vision.{c}") for c, s in {
        "before.gate": "pre_tile_positional_embedding.gate", "after.gate": "post_tile_positional_embedding.gate",
        "positions.gate": "gated_positional_embedding.gate", "positions.table": "gated_positional_embedding.embedding",
        "global.{i}.gates.attn": "global_transformer.layers.{i}.gate_attn",
        "global.{i}.gates.mlp": "global_transformer.layers.{i}.gate_ffn", "whole.class": "class_embedding",
    }.items()),
    *modules({"projector": "multi_modal_projector"}),
)


def tower(cfg: Config, _: int) -> Section:
    """Learned positions for each patch, each tile and each shape of a picture, all behind gates."""
    hidden, channels = cfg.integer("hidden_size"), cfg.integer("num_channels", default=3)
    n, side = patches(cfg)
    ratios = cfg.get("supported_aspect_ratios")
    if not isinstance(ratios, list):
        raise cfg.refuse("config-type", f"{cfg.prefix}supported_aspect_ratios is not a list")
    tiles, shapes = cfg.integer("max_num_tiles", hi=COUNT), len(ratios) + 1
    one = tuple(block(cfg, hidden))
    gates = (Leaf("gates.attn", (1,), ""), Leaf("gates.mlp", (1,), ""))
    return section("vision", [
        Leaf("patch.weight", (hidden, channels, side, side), ""),
        Leaf("before.table.weight", (shapes, tiles * hidden), ""), Leaf("before.gate", (1,), ""),
        Leaf("tiles.weight", (shapes, tiles * (n + 1) * hidden), ""),
        Leaf("positions.gate", (1,), ""), Leaf("positions.table", (n + 1, hidden), ""),
        *layer_norm("pre_norm", hidden), *under("layers.{i}", one, copies=depth(cfg)), *layer_norm("norm", hidden),
        Leaf("after.table.weight", (shapes, tiles * hidden), ""), Leaf("after.gate", (1,), ""),
        *under("global.{i}", (*one, *gates), copies=depth(cfg, "num_global_layers")),
        Leaf("whole.class", (hidden,), ""),
    ])


def block(cfg: Config, hidden: int) -> Iterator[Leaf]:
    """LayerNorm, attention without biases, LayerNorm, two biased matrices."""
    cfg.divided(hidden, cfg.integer("attention_heads", "num_attention_heads", hi=COUNT))
    ffn = cfg.integer("intermediate_size")
    yield from layer_norm("attn_norm", hidden)
    for x in "qkvo":
        yield from linear(f"attn.{x}", hidden, hidden, "")
    yield from layer_norm("mlp_norm", hidden)
    yield from (*linear("mlp.up", ffn, hidden, "", True), *linear("mlp.down", hidden, ffn, "", True))


def projector(cfg: Config, text_hidden: int) -> Section:
    """One biased matrix from vision_output_dim, the last features beside those of intermediate_layers_indices."""
    wide = cfg.integer("vision_output_dim")
    taps = cfg.integers("intermediate_layers_indices")
    cfg.expect("vision_output_dim", allowed=(cfg.integer("hidden_size") * (1 + len(taps)),))
    return section("projector", [Leaf("weight", (text_hidden, wide), ""), Leaf("bias", (text_hidden,), "")])
