"""Vision towers and projectors that stand beside a decoder: counted exactly, part by part, never run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from llamactl.arch._names import modules
from llamactl.errors import InputRefused
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import NotCounted, Section
from llamactl.spec.naming import Rule, Transposed, rule
from llamactl.spec.parts import MLP, Attention, Leaf, Norm, under

_BLOCK = {
    "attn.q": "self_attn.q_proj", "attn.k": "self_attn.k_proj", "attn.v": "self_attn.v_proj",
    "mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2",
}


def _tower(layers: str, extra: dict[str, str]) -> tuple[Rule, ...]:
    return modules({f"vision.layers.{{i}}.{c}": f"{layers}.{{i}}.{s}" for c, s in {**_BLOCK, **extra}.items()})


SIGLIP = (
    *_tower("vision_tower.vision_model.encoder.layers",
            {"attn.o": "self_attn.out_proj", "attn_norm": "layer_norm1", "mlp_norm": "layer_norm2"}),
    *modules({"vision.patch": "vision_tower.vision_model.embeddings.patch_embedding",
              "vision.positions": "vision_tower.vision_model.embeddings.position_embedding",
              "vision.norm": "vision_tower.vision_model.post_layernorm"}),
)
PROJECTOR_GEMMA3 = (
    rule("multi_modal_projector.mm_input_projection_weight", "projector.weight", ops=(Transposed(),)),
    rule("multi_modal_projector.mm_soft_emb_norm.weight", "projector.norm.weight"),
)
LLAMA4_VISION = (
    *_tower("vision_model.model.layers",
            {"attn.o": "self_attn.o_proj", "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}),
    *modules({"vision.patch": "vision_model.patch_embedding.linear", "vision.pre_norm": "vision_model.layernorm_pre",
              "vision.norm": "vision_model.layernorm_post", "vision.adapter.up": "vision_model.vision_adapter.mlp.fc1",
              "vision.adapter.down": "vision_model.vision_adapter.mlp.fc2",
              "projector": "multi_modal_projector.linear_1"}),
    rule("vision_model.class_embedding", "vision.class"),
    rule("vision_model.positional_embedding_vlm", "vision.positions"),
)


def block(cfg: Config, hidden: int, eps: float) -> tuple[Leaf, ...]:
    """One ViT block: LayerNorm, biased attention, LayerNorm, biased two-matrix MLP."""
    heads = cfg.integer("num_attention_heads", hi=COUNT)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=cfg.divided(hidden, heads),
                     qkv_bias=True, o_bias=True)
    ff = MLP(hidden=hidden, ffn=cfg.integer("intermediate_size"), activation="gelu", gated=False, bias=True)
    norm = Norm(dim=hidden, eps=eps, kind="layer", bias=True)
    return (*norm.leaves("attn_norm"), *under("attn", attn.leaves()), *norm.leaves("mlp_norm"),
            *under("mlp", ff.leaves()))


def section(name: str, leaves: Iterable[Leaf]) -> Section:
    """`leaves` below `name`, all counted under it."""
    return Section(name=name, leaves=tuple(Leaf(f"{name}.{x.path}" if x.path else name, x.shape, name, x.kind, x.copies)
                                           for x in leaves))


Maker = Callable[[Config, int], Section]


def beside(
    cfg: Config | None, text_hidden: int, *makers: Maker
) -> tuple[tuple[Section, ...], tuple[NotCounted, ...]]:
    """The sections that `makers` make of vision_config, or, where it lacks a shape, a line that says so."""
    if cfg is None:
        return (), (NotCounted(what="vision tower and projector", params=None, why="the file has no vision_config"),)
    try:
        return tuple(make(cfg, text_hidden) for make in makers), ()
    except InputRefused as e:
        if e.code != "config-missing":
            raise
        return (), (NotCounted(what="vision tower and projector", params=None, why=e.message),)


def patches(cfg: Config) -> tuple[int, int]:
    """(patches per image, pixels per patch side); the image must be cut evenly."""
    image, patch = cfg.integer("image_size"), cfg.integer("patch_size")
    if image % patch:
        raise cfg.refuse("config-range", f"an image of {image} pixels is not cut evenly by patches of {patch}")
    return (image // patch) ** 2, patch


def siglip(cfg: Config, _: int) -> Section:
    """SigLIP's vision transformer (arXiv:2303.15343) without the pooling head."""
    cfg.expect("model_type", allowed=("siglip_vision_model",), default="siglip_vision_model")
    cfg.expect("vision_use_head", allowed=(False,), default=True)
    hidden, channels = cfg.integer("hidden_size"), cfg.integer("num_channels", default=3)
    n, side = patches(cfg)
    eps = cfg.number("layer_norm_eps", default=1e-6)
    return section("vision", [
        Leaf("patch.weight", (hidden, channels, side, side), ""), Leaf("patch.bias", (hidden,), ""),
        Leaf("positions.weight", (n, hidden), ""),
        *under("layers.{i}", block(cfg, hidden, eps), copies=cfg.integer("num_hidden_layers", hi=LAYERS)),
        *Norm(dim=hidden, eps=eps, kind="layer", bias=True).leaves("norm"),
    ])


def gemma3_projector(cfg: Config, text_hidden: int) -> Section:
    """One matrix (text, vision) after a norm; stored (in, out)."""
    hidden = cfg.integer("hidden_size")
    return section("projector", [Leaf("weight", (text_hidden, hidden), ""), Leaf("norm.weight", (hidden,), "")])


def llama4(cfg: Config, _: int) -> Section:
    """Llama 4's vision transformer: class token, learned positions, pixel-shuffle adapter."""
    hidden, channels = cfg.integer("hidden_size"), cfg.integer("num_channels", default=3)
    n, side = patches(cfg)
    eps = cfg.number("norm_eps", default=1e-5)
    adapter_in, adapter_out = cfg.integer("projector_input_dim"), cfg.integer("projector_output_dim")
    norm = Norm(dim=hidden, eps=eps, kind="layer", bias=True)
    return section("vision", [
        Leaf("class", (hidden,), ""), Leaf("positions", (n + 1, hidden), ""),
        Leaf("patch.weight", (hidden, channels * side * side), ""),
        *norm.leaves("pre_norm"), *norm.leaves("norm"),
        *under("layers.{i}", block(cfg, hidden, eps), copies=cfg.integer("num_hidden_layers", hi=LAYERS)),
        Leaf("adapter.up.weight", (adapter_in, cfg.integer("intermediate_size")), ""),
        Leaf("adapter.down.weight", (adapter_out, adapter_in), ""),
    ])


def llama4_projector(cfg: Config, text_hidden: int) -> Section:
    """One Linear (text, vision_output_dim) without a bias."""
    return section("projector", [Leaf("weight", (text_hidden, cfg.integer("vision_output_dim")), "")])

