"""DeepSeek-V2 and V2-Lite: multi-head latent attention and fine-grained experts with shared ones (arXiv:2405.04434)."""

from __future__ import annotations

from llamactl.arch import _build as b
from llamactl.arch._names import EXPERTS, LLAMA_OUTER, MLP, PRE_NORMS, blocks, modules
from llamactl.spec.config import COUNT, LAYERS, Config
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model, NotCounted
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import MoE
from llamactl.spec.ropeconfig import read_context, read_rope

MODEL_TYPES = ("deepseek_v2",)
GGUF = ("deepseek2",)
H, L = "model.layers.{i}.", "layers.{i}."
LATENT = {
    "attn.q": "self_attn.q_proj", "attn.q_a": "self_attn.q_a_proj", "attn.q_a_norm": "self_attn.q_a_layernorm",
    "attn.q_b": "self_attn.q_b_proj", "attn.kv_a": "self_attn.kv_a_proj_with_mqa",
    "attn.kv_a_norm": "self_attn.kv_a_layernorm", "attn.o": "self_attn.o_proj",
}
SHARED = {f"mlp.shared.{x}": f"mlp.shared_experts.{x}_proj" for x in ("gate", "up", "down")}
HF = (
    *modules(LLAMA_OUTER),
    *blocks(LATENT, PRE_NORMS, MLP, EXPERTS, SHARED),
    rule(f"{H}self_attn.kv_b_proj.weight", f"{L}attn.k_b.weight", f"{L}attn.v_b.weight",
         ops=(Fused(order="per_group"),)),
    rule(f"{H}mlp.gate.e_score_correction_bias", f"{L}mlp.router.correction_bias"),
)


def describe(cfg: Config) -> Model:
    return latent(cfg, "deepseek_v2", correction=False)


def latent(cfg: Config, family: str, *, correction: bool) -> Model:
    """The stack that V2 and V3 share: first_k_dense_replace dense layers, then MoE.

    correction: V3's load-balancing bias, a stored buffer beside each router.
    """
    hidden, n = b.shape(cfg)
    cfg.expect("moe_layer_freq", allowed=(1,), default=1)
    if "q_lora_rank" not in cfg.data:
        raise cfg.refuse("config-missing", "q_lora_rank is missing (null stands for an unfactored q)")
    turned = cfg.integer("qk_rope_head_dim")
    rope = read_rope(cfg, turned, pairs="adjacent" if cfg.flag("rope_interleave", default=True) else "half")
    attn = LatentAttention(
        hidden=hidden, n_heads=cfg.integer("num_attention_heads", hi=COUNT),
        q_rank=cfg.integer("q_lora_rank", default=None), kv_rank=cfg.integer("kv_lora_rank"),
        qk_nope=cfg.integer("qk_nope_head_dim"), qk_rope=turned, v_dim=cfg.integer("v_head_dim"),
        eps=1e-6, rope=rope, bias=cfg.flag("attention_bias", default=False),
    )
    norm = b.rms(cfg, hidden)
    dense = Layer(attn=attn, mlp=b.mlp(cfg, hidden), attn_norm=norm, mlp_norm=norm)
    first = cfg.integer("first_k_dense_replace", lo=0, hi=LAYERS)
    if first >= n:
        return b.decoder(cfg, family, (dense,) * n, norm=norm, context=read_context(cfg, rope))
    sparse = Layer(attn=attn, mlp=experts(cfg, hidden, correction), attn_norm=norm, mlp_norm=norm)
    return b.decoder(cfg, family, [dense] * first + [sparse] * (n - first), norm=norm,
                     context=read_context(cfg, rope), not_counted=mtp(cfg, sparse, hidden))


def experts(cfg: Config, hidden: int, correction: bool) -> MoE:
    """Routed experts and one shared MLP as wide as n_shared_experts of them."""
    expert = b.mlp(cfg, hidden, key="moe_intermediate_size")
    n_shared = cfg.integer("n_shared_experts", lo=0, hi=COUNT, default=None)
    shared = None
    if n_shared:
        shared = type(expert)(hidden=hidden, ffn=expert.ffn * n_shared, activation=expert.activation)
    return b.moe(cfg, expert, "n_routed_experts", "num_experts", shared=shared, correction_bias=correction)


def mtp(cfg: Config, block: Layer, hidden: int) -> list[NotCounted]:
    """Multi-token-prediction layers: a block, its two input norms, the (hidden, 2 hidden) projection, a head norm.

    The router's correction bias is counted with them. The files store the embedding and head again beside them; those
    are copies (arXiv:2412.19437, section 2.2).
    """
    layers = cfg.integer("num_nextn_predict_layers", lo=0, hi=LAYERS, default=0)
    if not layers:
        return []
    one = sum(x.elements for x in block.leaves()) + 2 * hidden * hidden + 3 * hidden
    return [NotCounted(what="multi-token-prediction layers", params=layers * one,
                       why=f"{layers} stored after the decoder, used for drafting only")]
