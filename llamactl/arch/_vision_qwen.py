"""The vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL with their patch mergers, as sections."""

from __future__ import annotations

from llamactl.arch._names import modules
from llamactl.arch._towers import depth, layer_norm
from llamactl.arch._vision import section
from llamactl.spec.config import COUNT, Config
from llamactl.spec.model import Section
from llamactl.spec.naming import Rule
from llamactl.spec.parts import Leaf, Norm, linear, under

BLOCK = {"attn_norm": "norm1", "attn.qkv": "attn.qkv", "attn.o": "attn.proj", "mlp_norm": "norm2"}


def names(prefix: str, mlp: dict[str, str], merger: dict[str, str], **more: str) -> tuple[Rule, ...]:
    """The table of a tower below `prefix`. merger: of the projector; more: modules beside the blocks."""
    blocks = {f"vision.layers.{{i}}.{c}": f"{prefix}blocks.{{i}}.{s}" for c, s in {**BLOCK, **mlp}.items()}
    return modules({"vision.patch": f"{prefix}patch_embed.proj", **blocks} | {
        f"projector.{c}": f"{prefix}{s}" for c, s in merger.items()} | {
        f"vision.{c}": f"{prefix}{s}" for c, s in more.items()})


MERGER = {"norm": "merger.ln_q", "up": "merger.mlp.0", "down": "merger.mlp.2"}
MERGER3 = {f"{c}{x}": f"{s}{y}" for c, s in (("deepstack.{i}.", "deepstack_merger_list.{i}."), ("", "merger."))
           for x, y in (("norm", "norm"), ("up", "linear_fc1"), ("down", "linear_fc2"))}
QWEN2_VL = names("visual.", {"mlp.up": "mlp.fc1", "mlp.down": "mlp.fc2"}, MERGER)
QWEN2_5_VL = names("visual.", {f"mlp.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}, MERGER)
QWEN3_VL = names("model.visual.", {"mlp.up": "mlp.linear_fc1", "mlp.down": "mlp.linear_fc2"}, MERGER3,
                 positions="pos_embed")


def patch(cfg: Config, hidden: int, bias: bool) -> list[Leaf]:
    """The convolution that cuts temporal_patch_size pictures into patches."""
    side, frames = cfg.integer("patch_size"), cfg.integer("temporal_patch_size", default=2)
    weight = Leaf("patch.weight", (hidden, cfg.integer("in_channels", "in_chans", default=3), frames, side, side), "")
    return [weight, Leaf("patch.bias", (hidden,), "")] if bias else [weight]


def attention(cfg: Config, hidden: int) -> list[Leaf]:
    """q, k and v in one biased matrix, as stored, and the biased output."""
    cfg.divided(hidden, cfg.integer("num_heads", hi=COUNT))
    return [*linear("attn.qkv", 3 * hidden, hidden, "", True), *linear("attn.o", hidden, hidden, "", True)]


def two_matrices(hidden: int, ffn: int) -> list[Leaf]:
    """A biased feed-forward without a gate."""
    return [*linear("mlp.up", ffn, hidden, "", True), *linear("mlp.down", hidden, ffn, "", True)]


def qwen2_vl(cfg: Config, _: int) -> Section:
    """Qwen2-VL's tower (arXiv:2409.12191): LayerNorm, rotary positions, an MLP of mlp_ratio x embed_dim."""
    hidden = cfg.integer("embed_dim")
    ffn = hidden * cfg.integer("mlp_ratio", default=4)
    one = [*layer_norm("attn_norm", hidden), *attention(cfg, hidden), *layer_norm("mlp_norm", hidden),
           *two_matrices(hidden, ffn)]
    return section("vision", [*patch(cfg, hidden, False), *under("layers.{i}", tuple(one), copies=depth(cfg, "depth"))])


def qwen2_5_vl(cfg: Config, _: int) -> Section:
    """Qwen2.5-VL's tower (arXiv:2502.13923): RMSNorm, a gated MLP with biases, windows in most blocks."""
    hidden, ffn = cfg.integer("hidden_size"), cfg.integer("intermediate_size")
    norm = Norm(dim=hidden, eps=1e-6)
    one = [*norm.leaves("attn_norm"), *attention(cfg, hidden), *norm.leaves("mlp_norm"),
           *linear("mlp.gate", ffn, hidden, "", True), *two_matrices(hidden, ffn)]
    return section("vision", [*patch(cfg, hidden, False), *under("layers.{i}", tuple(one), copies=depth(cfg, "depth"))])


def qwen3_vl(cfg: Config, _: int) -> Section:
    """Qwen3-VL's tower: LayerNorm, learned positions besides the rotary ones, a biased patch convolution."""
    hidden = cfg.integer("hidden_size")
    one = [*layer_norm("attn_norm", hidden), *attention(cfg, hidden), *layer_norm("mlp_norm", hidden),
           *two_matrices(hidden, cfg.integer("intermediate_size"))]
    return section("vision", [*patch(cfg, hidden, True),
                              Leaf("positions.weight", (cfg.integer("num_position_embeddings"), hidden), ""),
                              *under("layers.{i}", tuple(one), copies=depth(cfg, "depth"))])


def merger(cfg: Config, hidden: int, out: int, norm: list[Leaf]) -> list[Leaf]:
    """A norm, then two biased matrices on spatial_merge_size^2 patches side by side."""
    wide = hidden * cfg.integer("spatial_merge_size", default=2) ** 2
    return [*norm, *linear("up", wide, wide, "", True), *linear("down", out, wide, "", True)]


def qwen2_vl_merger(cfg: Config, text_hidden: int) -> Section:
    """Patches to the text's width, which the tower's own hidden_size repeats."""
    cfg.expect("hidden_size", allowed=(text_hidden,))
    hidden = cfg.integer("embed_dim")
    return section("projector", merger(cfg, hidden, text_hidden, list(layer_norm("norm", hidden))))


def qwen2_5_vl_merger(cfg: Config, text_hidden: int) -> Section:
    """The same after an RMSNorm."""
    hidden, out = cfg.integer("hidden_size"), cfg.expect("out_hidden_size", allowed=(text_hidden,))
    return section("projector", merger(cfg, hidden, out, list(Norm(dim=hidden, eps=1e-6).leaves("norm"))))


def qwen3_vl_merger(cfg: Config, text_hidden: int) -> Section:
    """One merger for the last block and one for each of deepstack_visual_indexes, whose norm is over merged patches."""
    hidden, out = cfg.integer("hidden_size"), cfg.expect("out_hidden_size", allowed=(text_hidden,))
    wide = hidden * cfg.integer("spatial_merge_size", default=2) ** 2
    deep = merger(cfg, hidden, out, list(layer_norm("norm", wide)))
    taps = len(cfg.integers("deepstack_visual_indexes", hi=depth(cfg, "depth") - 1))
    last = merger(cfg, hidden, out, list(layer_norm("norm", hidden)))
    return section("projector", [*(under("deepstack.{i}", tuple(deep), copies=taps) if taps else ()), *last])
