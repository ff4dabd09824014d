"""Nemotron-H and Nemotron 3: each block is Mamba-2, unrotated attention, a relu2 MLP or experts (arXiv:2504.03624)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import blocks, modules
from llamactl.arch._routing import noaux
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
FEED_FORWARD = {f"mlp.{c}{x}": f"{s}{x}_proj" for x in ("up", "down") for c, s in (
    ("", ""), ("experts.{e}.", "experts.{e}."), ("shared.", "shared_experts."))}
HF = (
    *OUTER, *modules({"layers.{i}.mlp_norm": "backbone.layers.{i}.norm"}), *mixer(M, MAMBA2, MAMBA2_VECTORS),
    *blocks({f"attn.{x}": f"{x}_proj" for x in "qkvo"}, FEED_FORWARD, {"mlp.router": "gate"}, prefix=M),
    rule(f"{M}gate.e_score_correction_bias", "layers.{i}.mlp.router.correction_bias"),
)
WORDS = {"M": "state", "*": "attention", "-": "dense", "E": "sparse", "mamba": "state", "linear_attention": "state",
         "attention": "attention", "full_attention": "attention", "mlp": "dense", "moe": "sparse"}


def describe(cfg: Config) -> Model:
    hidden, kinds = b.width(cfg), block_kinds(cfg)
    norm = Norm(dim=hidden, eps=cfg.number("layer_norm_epsilon", default=1e-5))
    of: dict[str, Layer] = {}
    if "attention" in kinds:
        cfg.expect("attention_bias", allowed=(False,), default=False)
        cfg.expect("sliding_window", allowed=(None,), default=None)
        attn = b.attention(cfg, hidden, head_dim=cfg.integer("head_dim", "attention_head_dim"), kv_default="refuse")
        of["attention"] = Layer(attn=attn, mlp=None, attn_norm=norm)
    if "state" in kinds:
        of["state"] = Layer(attn=None, mlp=None, state=mamba2(cfg, hidden, norm.eps), attn_norm=norm)
    if "dense" in kinds:
        of["dense"] = Layer(attn=None, mlp=relu2(cfg, hidden, "intermediate_size"), mlp_norm=norm)
    if "sparse" in kinds:
        of["sparse"] = Layer(attn=None, mlp=experts(cfg, hidden), mlp_norm=norm)
    drafts = cfg.integer("num_nextn_predict_layers", lo=0, hi=LAYERS, default=0)
    left_out = NotCounted(what="multi-token-prediction layers", params=None,
                          why=f"{drafts} stored after the decoder, used for drafting only")
    return b.decoder(cfg, "nemotron_h", b.by_type(kinds, of), norm=norm, context=read_context(cfg, None),
                     not_counted=[left_out] if drafts else [])


def block_kinds(cfg: Config) -> tuple[str, ...]:
    """What each block is: layers_block_type has a word for each, hybrid_override_pattern a letter (M * - E)."""
    given = cfg.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    if not isinstance(given, list | str) or not given or not all(isinstance(x, str) and x in WORDS for x in given):
        raise cfg.refuse("config-layers", f"the blocks are {given!r}; known: {', '.join(sorted(WORDS))}")
    if cfg.integer("num_hidden_layers", hi=LAYERS, default=len(given)) != len(given):
        raise cfg.refuse("config-layers", f"{len(given)} blocks are listed for {cfg.data['num_hidden_layers']} layers")
    return tuple(WORDS[x] for x in given)


def mamba2(cfg: Config, hidden: int, eps: float) -> Mamba2:
    """The mixer: mamba_num_heads x mamba_head_dim channels, whatever `expand` says."""
    cfg.expect("mamba_hidden_act", allowed=("silu", "swish"), default="silu")
    return grouped(cfg, Mamba2(
        hidden=hidden, heads=cfg.integer("mamba_num_heads", hi=COUNT), head_dim=cfg.integer("mamba_head_dim"),
        groups=cfg.integer("n_groups", "mamba_n_groups", hi=COUNT), state=cfg.integer("ssm_state_size", hi=COUNT),
        kernel=cfg.integer("conv_kernel", "mamba_d_conv", hi=COUNT), bias=cfg.flag("use_bias", default=False),
        conv_bias=cfg.flag("use_conv_bias", "mamba_conv_bias", default=True), norm_eps=eps,
    ))


def relu2(cfg: Config, hidden: int, key: str) -> MLP:
    """Two matrices of width `key`, mlp_hidden_act between them."""
    return MLP(hidden=hidden, ffn=cfg.integer(key), activation=cfg.activation("mlp_hidden_act", default="relu2"),
               gated=False, bias=cfg.flag("mlp_bias", default=False))


def experts(cfg: Config, hidden: int) -> MoE:
    """Experts beside one that every token takes; V3's load-balancing buffer at the router."""
    cfg.expect("moe_latent_size", allowed=(None,), default=None)
    cfg.expect("n_shared_experts", allowed=(1,), default=1)
    expert, wide = (relu2(cfg, hidden, f"moe_{x}intermediate_size") for x in ("", "shared_expert_"))
    return b.moe(cfg, expert, "n_routed_experts", "num_local_experts", shared=wide, correction_bias=True,
                 routing=noaux(cfg))
