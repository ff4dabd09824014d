"""Baichuan 1 and 2: a Llama block with q, k, v in one matrix; 7B rotates, 13B has ALiBi instead (arXiv:2309.10305)."""

from __future__ import annotations

from dataclasses import replace

from llamactl.arch import _build as b
from llamactl.arch._names import LLAMA_OUTER, MLP, PRE_NORMS, blocks, modules
from llamactl.spec.config import COUNT, POSITIONS, Config
from llamactl.spec.model import Context, Model
from llamactl.spec.naming import Fused, rule
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope

MODEL_TYPES = ("baichuan",)
H, L = "model.layers.{i}.", "layers.{i}."
HF = (
    *modules(LLAMA_OUTER),
    *blocks(PRE_NORMS, MLP, {"attn.o": "self_attn.o_proj"}),
    rule(f"{H}self_attn.W_pack.weight", *(f"{L}attn.{x}.weight" for x in "qkv"), ops=(Fused(),)),
)
SECOND = 125_696  # the vocabulary of Baichuan 2; no key says that it scales the head's rows to length 1


def describe(cfg: Config) -> Model:
    hidden, n = b.shape(cfg)
    heads = cfg.integer("num_attention_heads", hi=COUNT)
    dim = cfg.divided(hidden, heads)
    rotates, context = positions(cfg)
    attn = Attention(hidden=hidden, n_heads=heads, n_kv_heads=heads, head_dim=dim, alibi=not rotates,
                     rope=Rope(dim=dim, theta=10000.0) if rotates else None)
    norm = b.rms(cfg, hidden)
    model = b.decoder(cfg, "baichuan", (b.pre_norm(attn, b.mlp(cfg, hidden), norm),) * n, norm=norm, context=context)
    return replace(model, head=replace(model.head, unit_rows=model.head.vocab == SECOND))


def positions(cfg: Config) -> tuple[bool, Context]:
    """(rotates, context): the 7B's config class has max_position_embeddings, the 13B's model_max_length alone."""
    length = cfg.integer("max_position_embeddings", hi=POSITIONS, default=None)
    if length is not None:
        return True, Context(trained=length, usable=length, why="max_position_embeddings")
    length = cfg.integer("model_max_length", hi=POSITIONS, default=None)
    if length is None:
        raise cfg.refuse("config-missing", "neither max_position_embeddings (rotation) nor model_max_length (ALiBi) is "
                         "there, so the positions are not known")
    return False, Context(trained=length, usable=length, why="model_max_length")
