"""What most families share: reading the outer parts, and the usual pre-norm block. Families call; nothing inherits."""

from __future__ import annotations

from collections.abc import Sequence

from llamactl.spec.config import COUNT, LAYERS, VOCAB, WIDTH, Config
from llamactl.spec.dtype import find_dtype
from llamactl.spec.model import Context, Layer, Model, NotCounted, Section
from llamactl.spec.parts import MLP, Attention, Embedding, Head, MoE, Norm, Positions
from llamactl.spec.rope import Rope

DROPOUTS = ("attention_dropout", "attn_pdrop", "resid_pdrop", "embd_pdrop", "hidden_dropout", "residual_dropout",
            "embedding_dropout")


def shape(cfg: Config) -> tuple[int, int]:
    """(hidden, n_layers) under any of their names."""
    return width(cfg), cfg.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers", hi=LAYERS)


def width(cfg: Config) -> int:
    """The hidden size under any of its names."""
    hidden: int = cfg.integer("hidden_size", "n_embd", "n_embed", "d_model", hi=WIDTH)
    return hidden


def dtype(cfg: Config) -> str | None:
    """The dtype the config names (`torch_dtype`, `dtype`), as one of our names; None where it names none."""
    node: Config | None = cfg
    while node is not None:
        word = node.get("dtype", "torch_dtype", default=None)
        if word is not None and word != "auto":
            found = find_dtype(word) if isinstance(word, str) else None
            if found is None:
                raise node.refuse("config-dtype", f"{node.prefix}dtype is {word!r}, not a known dtype")
            return found.name
        node = node.parent
    return None


def tied(cfg: Config, default: bool) -> tuple[bool, str]:
    """(tied, why). default: what the family's own config class says where the file is silent."""
    nodes = [cfg]
    while nodes[0].parent is not None:
        nodes.insert(0, nodes[0].parent)
    for node in nodes:  # the outer file decides, as it does for the model made of it
        if node.data.get("tie_word_embeddings") is not None:
            value = node.flag("tie_word_embeddings", default=default)
            return value, f"{node.prefix}tie_word_embeddings is {str(value).lower()}"
    word = "tied" if default else "untied"
    return default, f"tie_word_embeddings is absent; this family's default is {word}"


def quantization(cfg: Config) -> str | None:
    """The quantisation method the config names. It changes bytes, never parameter counts."""
    node: Config | None = cfg
    while node is not None:
        block = node.section("quantization_config", "compression_config")
        if block is not None:
            method = block.get("quant_method", "quantization_method", default="unnamed")
            return str(method)
        node = node.parent
    return None


def decoder(
    cfg: Config,
    family: str,
    layers: Sequence[Layer],
    *,
    norm: Norm | None,
    context: Context,
    tied_default: bool = False,
    embed_scale: float | None = None,
    head_bias: bool = False,
    softcap: float | None = None,
    positions: Positions | None = None,
    vocab_default: int | None = None,
    sections: Sequence[Section] = (),
    not_counted: Sequence[NotCounted] = (),
    dropout: float = 0.0,
    window_engines: tuple[str, ...] = ("arch", "hf", "vllm", "llama.cpp"),
) -> Model:
    """The Model around `layers`: embedding, head, tying, dtype and quantisation as the config has them."""
    hidden = width(cfg)
    vocab = cfg.integer("vocab_size", "padded_vocab_size", hi=VOCAB) if vocab_default is None else cfg.integer(
        "vocab_size", hi=VOCAB, default=vocab_default)
    is_tied, why = tied(cfg, tied_default)
    root = cfg
    while root.parent is not None:
        root = root.parent
    _expect_lm(root)
    return Model(
        family=family,
        model_type=str(root.data.get("model_type", family)),
        hidden=hidden,
        embed=Embedding(vocab=vocab, dim=hidden, scale=embed_scale),
        layers=tuple(layers),
        norm=norm,
        head=Head(vocab=vocab, hidden=hidden, tied=is_tied, bias=head_bias, softcap=softcap),
        tied_why=why,
        context=context,
        positions=positions,
        sections=tuple(sections),
        not_counted=tuple(not_counted),
        dtype=dtype(cfg),
        quantization=quantization(cfg),
        window_engines=window_engines,
        dropout=max(cfg.number(key, default=dropout, hi=1.0) for key in DROPOUTS),
        notes=tuple(cfg.warnings),
        reads=tuple(cfg.reads),
    )


def _expect_lm(root: Config) -> None:
    """Warn where `architectures` names a model without a language-model head (a classifier, an embedder)."""
    named = root.data.get("architectures")
    if not isinstance(named, list) or not named:
        return
    if not any(isinstance(a, str) and any(w in a for w in ("CausalLM", "LMHead", "ConditionalGeneration"))
               for a in named):
        root.warnings.append(("architecture-head", f"architectures is {named[0]!r}, which may have no language-model "
                              "head or another one; it is counted as a language model"))


def attention(
    cfg: Config,
    hidden: int,
    *,
    head_dim: int | None = None,
    kv_default: str = "heads",
    rope: Rope | None = None,
    window: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: Norm | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Attention:
    """Attention with heads as the config has them. qk_norm: one norm for both, on each head's row."""
    n_heads, n_kv, dim = heads(cfg, hidden, head_dim=head_dim, kv_default=kv_default)
    return Attention(
        hidden=hidden, n_heads=n_heads, n_kv_heads=n_kv, head_dim=dim, rope=rope, window=window, qkv_bias=qkv_bias,
        o_bias=o_bias, q_norm=qk_norm, k_norm=qk_norm, scale=scale, softcap=softcap,
    )


def heads(cfg: Config, hidden: int, *, head_dim: int | None = None, kv_default: str = "heads") -> tuple[int, int, int]:
    """(n_heads, n_kv_heads, head_dim). head_dim: the family's fixed default, else hidden / heads.

    kv_default="refuse": the family's files always name the KV heads, and its config class would fill in a number of
    its own, so a file without them cannot be judged.
    """
    if kv_default == "refuse" and "num_key_value_heads" not in cfg.data:
        raise cfg.refuse("config-missing", f"{cfg.prefix}num_key_value_heads is missing",
                         "write it into the config; this family has no rule for it")
    return cfg.heads(hidden=hidden, head_dim=head_dim)


def rope_dim(cfg: Config, hidden: int, *, head_dim: int | None = None, factor: float = 1.0) -> int:
    """Rotated dimensions of each head: head_dim x factor, an even number."""
    stated_null = "head_dim" in cfg.data and cfg.data["head_dim"] is None
    explicit = cfg.integer("head_dim", default=None if stated_null else head_dim)
    dim = explicit or cfg.divided(hidden, cfg.integer("num_attention_heads", "n_head", hi=COUNT))
    rotated = int(dim * factor)
    if rotated % 2 or rotated < 2:
        raise cfg.refuse("config-rope", f"{rotated} rotated dimensions of {dim}: rotation needs an even number")
    return rotated


def mlp(cfg: Config, hidden: int, *, activation: str | None = None, gated: bool = True, bias: bool = False,
        key: str = "intermediate_size") -> MLP:
    """The dense feed-forward of width `key`."""
    act = activation or cfg.activation("hidden_act", "hidden_activation", default="silu")
    return MLP(hidden=hidden, ffn=cfg.integer(key), activation=act, gated=gated, bias=bias)


def experts(cfg: Config, expert: MLP, *keys: str) -> tuple[int, int]:
    """(n_experts, top_k) under `keys` / num_experts_per_tok, top_k <= n_experts."""
    n = cfg.integer(*keys, hi=COUNT)
    top_k = cfg.integer("num_experts_per_tok", "experts_per_token", "moe_top_k", hi=COUNT)
    if top_k > n:
        raise cfg.refuse("config-range", f"{top_k} experts per token of {n}")
    return n, top_k


def moe(cfg: Config, expert: MLP, *keys: str, **fields: object) -> MoE:
    """A mixture of `expert`s, their number under `keys`."""
    n, top_k = experts(cfg, expert, *keys)
    return MoE(hidden=expert.hidden, n_experts=n, top_k=top_k, expert=expert, **fields)  # type: ignore[arg-type]


def rms(cfg: Config, dim: int, *, default: float = 1e-6, offset: bool = False) -> Norm:
    """An RMSNorm of `dim` with the file's epsilon; default: the family's own."""
    return Norm(dim=dim, eps=cfg.number("rms_norm_eps", default=default), offset=offset)


def layer_norm(cfg: Config, dim: int, *keys: str, default: float = 1e-5, bias: bool = True) -> Norm:
    """A LayerNorm of `dim`, its epsilon under any of `keys`; default: the family's own."""
    return Norm(dim=dim, eps=cfg.number(*keys, default=default), kind="layer", bias=bias)


def pre_norm(attn: Attention, ff: MLP | MoE, norm: Norm, *, parallel: bool = False) -> Layer:
    """norm -> attention -> norm -> feed-forward, each added to the stream; parallel: one norm feeds both."""
    return Layer(attn=attn, mlp=ff, attn_norm=norm, mlp_norm=None if parallel else norm, parallel=parallel)


def softcap(cfg: Config, key: str, default: float | None) -> float | None:
    """A soft cap on logits: null means none, absent means the family's own default."""
    if key in cfg.data and cfg.data[key] is None:
        return None
    value: float | None = cfg.number(key, default=default, lo=1e-6)
    return value


def window(cfg: Config, default: int | None) -> int | None:
    """sliding_window: null means none, absent means the family's own default."""
    if "sliding_window" in cfg.data and cfg.data["sliding_window"] is None:
        return None
    value: int | None = cfg.integer("sliding_window", hi=1 << 40, default=default)
    return value


def by_type(types: Sequence[str], of: dict[str, Layer]) -> tuple[Layer, ...]:
    """One Layer per word of `types`; equal words share one object."""
    return tuple(of[t] for t in types)


def pattern(cfg: Config, n_layers: int, every: int, *, other: str = "sliding_attention") -> tuple[str, ...]:
    """`layer_types` as the file has it, else every `every`-th layer full and the rest `other`."""
    given = cfg.layer_types(n_layers, ("full_attention", other))
    if given is not None:
        return given
    return tuple("full_attention" if (i + 1) % every == 0 else other for i in range(n_layers))
