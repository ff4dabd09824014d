"""Nemotron-H and Nemotron 3: each block is Mamba-2, unrotated attention, a relu2 MLP or experts (arXiv:2504.03624)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import modules
from llamactl.arch._state import MAMBA2, MAMBA2_VECTORS, grouped, mixer
from llamactl.arch.mamba import OUTER
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.model import Layer, Model, NotCounted
from llamactl.spec.naming import rule
from llamactl.spec.parts import MLP, MoE, Norm
from llamactl.spec.ropeconfig import read_context
from llamactl.spec.state import Mamba2

MODEL_TYPES = ("nemotron_h",)
M = "backbone.layers.{i}.mixer."
UP_DOWN = ("up", "down")
BRANCHES = {
    "mlp_norm": "backbone.layers.{i}.norm", **{f"attn.{x}": f"{M}{x}_proj" for x in "qkvo"},
    **{f"mlp.{x}": f"{M}{x}_proj" for x in UP_DOWN}, "mlp.router": f"{M}gate",
    **{f"mlp.experts.{{e}}.{x}": f"{M}experts.{{e}}.{x}_proj" for x in UP_DOWN},
    **{f"mlp.shared.{x}": f"{M}shared_experts.{x}_proj" for x in UP_DOWN},
}
HF = (
    *OUTER, *modules({f"layers.{{i}}.{c}": s for c, s in BRANCHES.items()}), *mixer(M, MAMBA2, MAMBA2_VECTORS),
    rule(f"{M}gate.e_score_correction_bias", "layers.{i}.mlp.router.correction_bias"),
)
WORDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe", "linear_attention": "mamba",
         "full_attention": "attention", **{x: x for x in ("mamba", "attention", "mlp", "moe")}}


def describe(cfg: Config) -> Model:
    hidden, kinds = cfg.integer("hidden_size"), blocks(cfg)
    cfg.expect("sliding_window", "moe_latent_size", allowed=(None,), default=None)
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_epsilon", default=1e-5))
    of: dict[str, Layer] = {}
    if "attention" in kinds:
        bias = cfg.flag("attention_bias", default=False)
        head_dim = cfg.integer("head_dim", "attention_head_dim")
        attn = b.attention(cfg, hidden, head_dim=head_dim, kv_default="refuse", qkv_bias=bias, o_bias=bias)
        of["attention"] = Layer(attn=attn, mlp=None, attn_norm=norm)
    if "mamba" in kinds:
        of["mamba"] = Layer(attn=None, mlp=None, state=mamba2(cfg, hidden, norm.eps), attn_norm=norm)
    if "mlp" in kinds:
        of["mlp"] = Layer(attn=None, mlp=relu2(cfg, hidden, "intermediate_size"), mlp_norm=norm)
    if "moe" in kinds:
        of["moe"] = Layer(attn=None, mlp=experts(cfg, hidden), mlp_norm=norm)
    drafts = cfg.integer("num_nextn_predict_layers", lo=0, hi=LAYERS, default=0)
    left_out = [NotCounted(what="multi-token-prediction layers", params=None,
                           why=f"{drafts} stored after the decoder, used for drafting only")] if drafts else []
    return b.decoder(cfg, "nemotron_h", b.by_type(kinds, of), norm=norm, context=read_context(cfg, None),
                     not_counted=left_out)


def blocks(cfg: Config) -> tuple[str, ...]:
    """What each block is: layers_block_type, a word each, or hybrid_override_pattern, a letter each (M * - E)."""
    given = cfg.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    if not isinstance(given, list | str) or not given or not all(isinstance(x, str) and x in WORDS for x in given):
        raise cfg.refuse("config-layers", f"the blocks are {given!r}; known: {', '.join(sorted(WORDS))}")
    if cfg.integer("num_hidden_layers", hi=LAYERS, default=len(given)) != len(given):
        raise cfg.refuse("config-layers", f"{len(given)} blocks are listed for {cfg.data['num_hidden_layers']} layers")
    return tuple(WORDS[x] for x in given)


def relu2(cfg: Config, hidden: int, key: str) -> MLP:
    """Two matrices of width `key`; mlp_hidden_act between them."""
    return MLP(hidden=hidden, ffn=cfg.integer(key), activation=cfg.activation("mlp_hidden_act", default="relu2"),
               gated=False, bias=cfg.flag("mlp_bias", default=False))


def experts(cfg: Config, hidden: int) -> MoE:
    """Ungated experts beside one shared expert of a width of its own."""
