"""Gemma 4's vision tower as a section: four norms a block, normed q and k, positions from two tables (x and y)."""

from __future__ import annotations

from collections.abc import Iterator

from llamactl.arch._names import modules
from llamactl.arch._towers import depth
from llamactl.arch._vision import section
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Section
from llamactl.spec.naming import rule
from llamactl.spec.parts import Leaf, Norm, linear, under

V, LAYER = "model.vision_tower.", "model.vision_tower.encoder.layers.{i}."
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
LINEAR = {f"attn.{x}": f"self_attn.{x}_proj" for x in "qkvo"} | {
    f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
NAMES = (
    *modules({"vision.patch": f"{V}patch_embedder.input_proj", "projector": "model.embed_vision.embedding_projection",
              **{f"vision.layers.{{i}}.{c}": f"{LAYER}{s}.linear" for c, s in LINEAR.items()},
              **{f"vision.layers.{{i}}.{c}": f"{LAYER}{s}" for c, s in {
                  "attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
                  "attn_post_norm": "post_attention_layernorm", "mlp_norm": "pre_feedforward_layernorm",
                  "mlp_post_norm": "post_feedforward_layernorm"}.items()}}),
    *(rule(f"{LAYER}{s}.{x}", f"vision.layers.{{i}}.{c}.clip.{x}") for c, s in LINEAR.items() for x in BOUNDS),
    rule(f"{V}patch_embedder.position_embedding_table", "vision.positions.table"),
    rule(f"{V}std_bias", "vision.std.bias"), rule(f"{V}std_scale", "vision.std.scale"),
)


def tower(cfg: Config, _: int) -> Section:
    """Patches as one matrix, positions, blocks; standardize stores a mean and a scale, clipping four bounds each."""
    cfg.expect("model_type", allowed=("gemma4_vision",), default="gemma4_vision")
    cfg.expect("attention_bias", allowed=(False,), default=False)
    hidden, side = cfg.integer("hidden_size"), cfg.integer("patch_size")
    std = [Leaf(f"std.{x}", (hidden,), "", "buffer") for x in ("bias", "scale")]
    return section("vision", [
        Leaf("patch.weight", (hidden, 3 * side**2), ""),
        Leaf("positions.table", (2, cfg.integer("position_embedding_size"), hidden), ""),
        *under("layers.{i}", tuple(block(cfg, hidden)), copies=depth(cfg)),
        *(std if cfg.flag("standardize", default=False) else ()),
    ])


def block(cfg: Config, hidden: int) -> Iterator[Leaf]:
    """One block, its matrices clipped where the config says so."""
    n, kv = cfg.integer("num_attention_heads", hi=COUNT), cfg.integer("num_key_value_heads", hi=COUNT)
    dim, ffn = cfg.integer("head_dim"), cfg.integer("intermediate_size")
    clipped = cfg.flag("use_clipped_linears", default=False)

    def matrix(path: str, out: int, in_: int) -> Iterator[Leaf]:
        yield from linear(path, out, in_, "")
        if clipped:
            yield from (Leaf(f"{path}.clip.{x}", (), "", "buffer") for x in BOUNDS)

    norm, small = Norm(dim=hidden, eps=1e-6), Norm(dim=dim, eps=1e-6)
    yield from norm.leaves("attn_norm")
    yield from (*matrix("attn.q", n * dim, hidden), *small.leaves("attn.q_norm"))
    yield from (*matrix("attn.k", kv * dim, hidden), *small.leaves("attn.k_norm"))
    yield from (*matrix("attn.v", kv * dim, hidden), *matrix("attn.o", hidden, n * dim))
    yield from (*norm.leaves("attn_post_norm"), *norm.leaves("mlp_norm"))
    yield from (*matrix("mlp.gate", ffn, hidden), *matrix("mlp.up", ffn, hidden), *matrix("mlp.down", hidden, ffn))
    yield from norm.leaves("mlp_post_norm")


def projector(cfg: Config, text_hidden: int) -> Section:
    """One matrix after a norm without weights."""
    return section("projector", [Leaf("weight", (text_hidden, cfg.integer("hidden_size")), "")])
