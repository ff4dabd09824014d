"""Gemma 4's parts: names, heads by layer, two rotations, and experts that stand beside the MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llamactl.arch._names import ATTENTION, LLAMA_OUTER, MLP, QK_NORM, blocks, modules
from llamactl.arch.gemma2 import NORMS
from llamactl.spec import parts
from llamactl.spec.config import COUNT, Config, kind_of
from llamactl.spec.naming import Fused, rule
from llamactl.spec.rope import Rope
from llamactl.spec.ropeconfig import read_theta, rope_block

H, L, E = "model.layers.{i}.", "layers.{i}.", "layers.{i}.mlp.experts.{e}."
TEXT = (
    *modules(LLAMA_OUTER), *blocks(ATTENTION, QK_NORM, NORMS, MLP),
    *blocks({"mlp.router": "router.proj", **{f"mlp.shared.{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
             "mlp.shared_norm": "post_feedforward_layernorm_1", "mlp.experts_norm": "pre_feedforward_layernorm_2",
             "mlp.experts_post_norm": "post_feedforward_layernorm_2"}),
    rule(f"{H}layer_scalar", f"{L}scalar"), rule(f"{H}router.scale", f"{L}mlp.router.scale"),
    rule(f"{H}router.per_expert_scale", f"{L}mlp.router.expert_scale"),
    rule(f"{H}experts.gate_up_proj", f"{E}gate.weight", f"{E}up.weight", ops=(Fused(),), stacked=True),
    rule(f"{H}experts.down_proj", f"{E}down.weight", stacked=True),
)
Heads = tuple[int, int, int]


def heads(cfg: Config, n: int, full: Sequence[bool]) -> list[Heads]:
    """(n_heads, n_kv_heads, head_dim) of each layer. per_layer_config, which transformers writes, comes first."""
    n_heads = cfg.integer("num_attention_heads", hi=COUNT)
    usual = (n_heads, cfg.integer("num_key_value_heads", hi=COUNT), cfg.integer("head_dim", default=256))
    given = cfg.section("per_layer_config")
    if given is not None:
        own = [_own(given, i, usual) for i in range(n)]
    else:
        kv = cfg.integer("num_global_key_value_heads", hi=COUNT, default=None)
        if kv is None or not cfg.flag("attention_k_eq_v", default=False):
            kv = usual[1]
        wide = (n_heads, kv, cfg.integer("global_head_dim", default=512) if any(full) else usual[2])
        own = [wide if whole else usual for whole in full]
    for _, n_kv, dim in own:
        if n_heads % n_kv or dim % 2:
            raise cfg.refuse("config-heads", f"{n_heads} heads of {dim} cannot share {n_kv} KV heads evenly")
    return own


def _own(given: Config, layer: int, usual: Heads) -> Heads:
    one = given.section(str(layer))
    if one is None:
        return usual
    unknown = sorted(one.data.keys() - {"head_dim", "num_key_value_heads"})
    if unknown:
        raise given.refuse("config-unsupported", f"{one.prefix}{unknown[0]} is set; known here: head_dim, "
                           "num_key_value_heads")
    return (usual[0], one.integer("num_key_value_heads", hi=COUNT, default=usual[1]),
            one.integer("head_dim", default=usual[2]))


def rotations(cfg: Config) -> Callable[[int, bool], Rope]:
    """(head_dim, full) -> the rotation. A full layer turns its first quarter of pairs, at the whole head's pace."""
    def read(dim: int, full: bool) -> Rope:
        block = rope_block(cfg, "full_attention" if full else "sliding_attention")
        if block is None:
            turned = 2 * (dim // 8) if full else dim
            return Rope(dim=turned, theta=1e6 if full else 1e4, span=dim if full else None)
        word = block.expect("rope_type", allowed=("default", "proportional"), default="default")
        block.expect("factor", allowed=(1, 1.0), default=1.0)
        theta = read_theta(cfg, 1e6 if full else 1e4, block)
        if word == "default":
            block.expect("partial_rotary_factor", allowed=(1, 1.0), default=1.0)
            return Rope(dim=dim, theta=theta)
        share = block.number("partial_rotary_factor", default=1.0, hi=1.0)
        turned = 2 * int(share * dim // 2)
        if turned < 2:
            raise cfg.refuse("config-rope", f"{kind_of(share)} of {dim} dimensions rotates none")
        return Rope(dim=turned, theta=theta, span=dim)

    return read


def experts(cfg: Config, dense: parts.MLP, eps: float) -> tuple[parts.MLP | parts.MoE, parts.Leaves]:
    """The feed-forward and what stands beside it: with experts, the dense MLP is the one that runs for every token."""
    if not cfg.flag("enable_moe_block", default=False):
        return dense, ()
    hidden, n = dense.hidden, cfg.integer("num_experts", hi=COUNT)
    top_k = cfg.integer("top_k_experts", hi=n)
    expert = parts.MLP(hidden=hidden, ffn=cfg.integer("moe_intermediate_size", "expert_intermediate_size"),
                       activation=dense.activation)
    norm = parts.Norm(dim=hidden, eps=eps)
    extra = (parts.Leaf("mlp.router.scale", (hidden,), "feed_forward.router"),
             parts.Leaf("mlp.router.expert_scale", (n,), "feed_forward.router"),
             *(x for name in ("shared", "experts", "experts_post") for x in norm.leaves(f"mlp.{name}_norm")))
    return parts.MoE(hidden=hidden, n_experts=n, top_k=top_k, expert=expert, shared=dense), extra
