"""More vision towers and projectors, as sections: counted exactly, never run, so fused tensors stay as they are stored.

Leaves stand in the order in which the tower uses them; tests/arch/content.py holds them to that order.
"""

from __future__ import annotations

from collections.abc import Iterator

from llamactl.arch._names import modules
from llamactl.arch._vision import block, patches, section
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Section
from llamactl.spec.naming import rule
from llamactl.spec.parts import MLP, Attention, Leaf, Norm, linear, under

E, X = "vision_tower.vision_model.", "vision_tower."
LAYER = {
    "attn_norm": "layer_norm1", "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj", "attn.o": "self_attn.out_proj", "mlp_norm": "layer_norm2", "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
}
CLIP = (
    *modules({"vision.patch": f"{E}embeddings.patch_embedding", "vision.positions": f"{E}embeddings.position_embedding",
              "vision.pre_norm": f"{E}pre_layrnorm", "vision.norm": f"{E}post_layernorm"}),
    rule(f"{E}embeddings.class_embedding", "vision.embed.class"),
    *modules({f"vision.layers.{{i}}.{c}": f"{E}encoder.layers.{{i}}.{s}" for c, s in LAYER.items()}),
)
PIXTRAL = modules({"vision.patch": f"{X}patch_conv", "vision.pre_norm": f"{X}ln_pre"} | {
    f"vision.layers.{{i}}.{c}": f"{X}transformer.layers.{{i}}.{s}" for c, s in {
        "attn_norm": "attention_norm", "attn.q": "attention.q_proj", "attn.k": "attention.k_proj",
        "attn.v": "attention.v_proj", "attn.o": "attention.o_proj", "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.gate_proj", "mlp.up": "feed_forward.up_proj", "mlp.down": "feed_forward.down_proj",
    }.items()})
P = "multi_modal_projector."
LLAVA = modules({"projector.up": f"{P}linear_1", "projector.down": f"{P}linear_2"})
MISTRAL3 = (*LLAVA, *modules({"projector.norm": f"{P}norm", "projector.merge": f"{P}patch_merger.merging_layer"}))


def layer_norm(path: str, dim: int) -> Iterator[Leaf]:
    """A LayerNorm's weight and bias."""
    return Norm(dim=dim, eps=1e-5, kind="layer", bias=True).leaves(path)


def depth(cfg: Config, *keys: str) -> int:
    """The tower's number of blocks."""
    n: int = cfg.integer(*(keys or ("num_hidden_layers",)), hi=LAYERS)
    return n


def clip(cfg: Config, _: int) -> Section:
    """CLIP's vision transformer (arXiv:2103.00020) without its projection: class token, learned positions."""
    cfg.expect("model_type", allowed=("clip_vision_model",), default="clip_vision_model")
    hidden, channels = cfg.integer("hidden_size"), cfg.integer("num_channels", default=3)
    n, side = patches(cfg)
    return section("vision", [
        Leaf("patch.weight", (hidden, channels, side, side), ""), Leaf("positions.weight", (n + 1, hidden), ""),
        Leaf("embed.class", (hidden,), ""), *layer_norm("pre_norm", hidden),
        *under("layers.{i}", block(cfg, hidden, 1e-5), copies=depth(cfg)), *layer_norm("norm", hidden),
    ])


def pixtral(cfg: Config, _: int) -> Section:
    """Pixtral's vision transformer (arXiv:2410.07073): RMSNorm, rotary positions in two dimensions, a gated MLP."""
    cfg.expect("model_type", allowed=("pixtral",), default="pixtral")
    hidden, side = cfg.integer("hidden_size"), cfg.integer("patch_size")
    channels = cfg.integer("num_channels", default=3)
    heads = cfg.integer("num_attention_heads", hi=COUNT)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads))
    norm = Norm(dim=hidden, eps=1e-5)
    return section("vision", [
        Leaf("patch.weight", (hidden, channels, side, side), ""), *norm.leaves("pre_norm"),
        *under("layers.{i}", (
            *norm.leaves("attn_norm"), *under("attn", attn.leaves()), *norm.leaves("mlp_norm"),
            *under("mlp", MLP(hidden=hidden, ffn=cfg.integer("intermediate_size"), activation="gelu").leaves()),
        ), copies=depth(cfg)),
    ])


def features(cfg: Config) -> int:
    """How many of the tower's layers the projector reads: vision_feature_layer of the outer config, one or a list."""
    assert cfg.parent is not None
    which = cfg.parent.get("vision_feature_layer", default=-1)
    return len(which) if isinstance(which, list) else 1


def llava_projector(cfg: Config, text_hidden: int) -> Section:
    """Two matrices with a GELU between them."""
    assert cfg.parent is not None
    bias = cfg.parent.flag("multimodal_projector_bias", default=True)
    return section("projector", [
        *linear("up", text_hidden, cfg.integer("hidden_size") * features(cfg), "", bias),
        *linear("down", text_hidden, text_hidden, "", bias),
    ])


def mistral3_projector(cfg: Config, text_hidden: int) -> Section:
    """A norm, a matrix that merges spatial_merge_size^2 patches into one, and LLaVA's two matrices."""
    assert cfg.parent is not None
    hidden, merge = cfg.integer("hidden_size"), cfg.parent.integer("spatial_merge_size", default=2)
    bias = cfg.parent.flag("multimodal_projector_bias", default=False)
    if features(cfg) != 1:
        raise cfg.refuse("config-unsupported", "vision_feature_layer names several layers; this projector reads one")
    return section("projector", [
        *Norm(dim=hidden, eps=1e-5).leaves("norm"), *linear("merge", hidden, hidden * merge**2, ""),
        *linear("up", text_hidden, hidden, "", bias),
        *linear("down", text_hidden, text_hidden, "", bias),
    ])


KIMI = modules({"vision.patch": f"{X}patch_embed.proj", "vision.positions": f"{X}patch_embed.pos_emb",
                "vision.norm": f"{X}encoder.final_layernorm", "projector.norm": "mm_projector.pre_norm",
                "projector.up": "mm_projector.proj.0", "projector.down": "mm_projector.proj.2"} | {
    f"vision.layers.{{i}}.{c}": f"{X}encoder.blocks.{{i}}.{s}" for c, s in {
        "attn_norm": "norm0", "attn.qkv": "wqkv", "attn.o": "wo", "mlp_norm": "norm1", "mlp.up": "mlp.fc0",
        "mlp.down": "mlp.fc1"}.items()})


def kimi(cfg: Config, _: int) -> Section:
    """MoonViT in three dimensions (arXiv:2602.02276): a learned grid, rotary positions, sines for time (no weights)."""
    cfg.expect("pos_emb_type", allowed=("divided_fixed",), default="divided_fixed")
    cfg.expect("merge_type", allowed=("sd2_tpool",), default="sd2_tpool")
    hidden, side = cfg.integer("vt_hidden_size", "hidden_size"), cfg.integer("patch_size")
    grid = (cfg.integer("init_pos_emb_height", "pos_emb_height"), cfg.integer("init_pos_emb_width", "pos_emb_width"))
    ffn = cfg.integer("vt_intermediate_size", "intermediate_size")
    cfg.divided(hidden, cfg.integer("vt_num_attention_heads", "num_attention_heads", hi=COUNT))
    return section("vision", [
        *(Leaf(f"patch.{p}", shape, "") for p, shape in (("weight", (hidden, 3, side, side)), ("bias", (hidden,)))),
        Leaf("positions.weight", (*grid, hidden), ""),
        *under("layers.{i}", (
            *layer_norm("attn_norm", hidden), *linear("attn.qkv", 3 * hidden, hidden, "", True),
            *linear("attn.o", hidden, hidden, "", True), *layer_norm("mlp_norm", hidden),
            *linear("mlp.up", ffn, hidden, "", True), *linear("mlp.down", hidden, ffn, "", True),
        ), copies=depth(cfg, "vt_num_hidden_layers", "num_hidden_layers")),
        *layer_norm("norm", hidden),
    ])


def kimi_projector(cfg: Config, text_hidden: int) -> Section:
    """A norm, then two matrices on merge_kernel_size patches side by side."""
    cfg.expect("mm_projector_type", allowed=("patchmerger",), default="patchmerger")
    cfg.expect("text_hidden_size", allowed=(text_hidden,), default=text_hidden)
    hidden = cfg.integer("vt_hidden_size", "hidden_size")
    cfg.expect("mm_hidden_size", allowed=(hidden,), default=hidden)
    kernel = cfg.integers("merge_kernel_size", lo=1, hi=COUNT)
    if len(kernel) != 2:
        raise cfg.refuse("config-type", f"{cfg.prefix}merge_kernel_size is not a pair")
    wide = hidden * kernel[0] * kernel[1]
    return section("projector", [*layer_norm("norm", hidden), *linear("up", wide, wide, "", True),
                                 *linear("down", text_hidden, wide, "", True)])
