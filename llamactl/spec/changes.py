"""The functions behind edits: pure, Model -> Model, each refusing a model it has no meaning for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from llamactl.errors import UsageError
from llamactl.spec.model import Context, Layer, Model
from llamactl.spec.parts import MLP, Attention, LearnedPositions, MoE, Norm, SinusoidalPositions
from llamactl.spec.rope import Rope


def impossible(why: str) -> UsageError:
    """An edit that has no meaning for this model."""
    return UsageError("edit", why)


def each_layer(model: Model, change: Callable[[Layer], Layer]) -> Model:
    """Every layer changed; equal layers are changed once and stay one object."""
    made: dict[Layer, Layer] = {}
    for layer, _ in model.distinct_layers():
        made[layer] = change(layer)
    return replace(model, layers=tuple(made[layer] for layer in model.layers))


def each_attention(model: Model, change: Callable[[Attention], Attention], what: str) -> Model:
    """Every attention part changed; `what` names the edit where there is none to change."""
    def one(layer: Layer) -> Layer:
        if layer.attn is None:
            return layer
        if not isinstance(layer.attn, Attention):
            raise impossible(f"{what} has no meaning for latent attention: all heads share one latent")
        return replace(layer, attn=change(layer.attn))

    return each_layer(model, one)


def each_mlp(model: Model, change: Callable[[MLP], MLP], *, dense: bool = True, expert: bool = False) -> Model:
    """Feed-forwards changed: the dense ones, and with `expert` also those inside a mixture."""
    def one(layer: Layer) -> Layer:
        ff = layer.mlp
        if isinstance(ff, MLP) and dense:
            return replace(layer, mlp=change(ff))
        if isinstance(ff, MoE) and expert:
            shared = change(ff.shared) if ff.shared else None
            return replace(layer, mlp=replace(ff, expert=change(ff.expert), shared=shared))
        return layer

    return each_layer(model, one)


def with_heads(part: Attention, n_heads: int, n_kv: int) -> Attention:
    """Other head counts at the same head_dim; norms that span heads follow."""
    if n_heads % n_kv:
        raise impossible(f"{n_heads} heads cannot share {n_kv} KV heads evenly")

    def norm(old: Norm | None, heads: int, before: int) -> Norm | None:
        if old is None:
            return None
        if old.heads:
            return replace(old, heads=heads)
        return replace(old, dim=heads * part.head_dim) if old.dim == before * part.head_dim != part.head_dim else old

    return replace(part, n_heads=n_heads, n_kv_heads=n_kv, q_norm=norm(part.q_norm, n_heads, part.n_heads),
                   k_norm=norm(part.k_norm, n_kv, part.n_kv_heads),
                   hf_cache_heads=n_heads if part.hf_cache_heads else None)


def set_kv_heads(model: Model, n: int) -> Model:
    """n heads of K and V, shared by the query heads: 1 is MQA."""
    return each_attention(model, lambda a: with_heads(a, a.n_heads, n), "n_kv_heads")


def set_heads(model: Model, n: int) -> Model:
    """n query heads; where every head had its own K and V, it keeps them."""

    def one(a: Attention) -> Attention:
        return with_heads(a, n, n if a.n_kv_heads == a.n_heads else a.n_kv_heads)

    return each_attention(model, one, "n_heads")


def set_ffn(model: Model, n: int) -> Model:
    """Width of the dense feed-forward."""
    if not any(isinstance(layer.mlp, MLP) for layer in model.layers):
        raise impossible("this model has no dense feed-forward: set expert_ffn")
    return each_mlp(model, lambda m: replace(m, ffn=n))


def each_moe(model: Model, change: Callable[[MoE], MoE]) -> Model:
    """Every mixture of experts changed."""
    if not any(isinstance(layer.mlp, MoE) for layer in model.layers):
        raise impossible("this model has no experts")
    return each_layer(model, lambda x: replace(x, mlp=change(x.mlp)) if isinstance(x.mlp, MoE) else x)


def with_experts(part: MoE, n: int, top_k: int) -> MoE:
    """A mixture of n experts, top_k of them for each token."""
    if top_k > n:
        raise impossible(f"{top_k} experts per token of {n}")
    return replace(part, n_experts=n, top_k=top_k)


def set_layers(model: Model, n: int) -> Model:
    """The first n layers, or n equal ones."""
    if n > model.n_layers and len(set(model.layers)) > 1:
        raise impossible(f"the {model.n_layers} layers differ, so what layer {model.n_layers} would be is a guess")
    layers = model.layers[:n] if n <= model.n_layers else (model.layers[0],) * n
    return replace(model, layers=layers)


def set_vocab(model: Model, n: int) -> Model:
    """Rows of the embedding and the head."""
    return replace(model, embed=replace(model.embed, vocab=n), head=replace(model.head, vocab=n))


def set_tie(model: Model, tied: bool) -> Model:
    """Whether the head is the embedding."""
    return replace(model, head=replace(model.head, tied=tied), tied_why=f"edited: tie={str(tied).lower()}")


def set_activation(model: Model, name: str) -> Model:
    """The activation of every feed-forward, experts too."""
    return each_mlp(model, lambda m: replace(m, activation=name), expert=True)


def set_gate(model: Model, gated: bool) -> Model:
    """Three matrices instead of two, or back, at the same width."""
    return each_mlp(model, lambda m: replace(m, gated=gated), expert=True)


def set_norm(model: Model, kind: str) -> Model:
    """rms: a scale; layer: a scale and a shift. Norms on q, k and latents stay as they are."""

    def norm(old: Norm | None) -> Norm | None:
        return None if old is None else replace(old, kind=kind, bias=kind == "layer", offset=False)

    changed = each_layer(model, lambda x: replace(
        x, attn_norm=norm(x.attn_norm), attn_post_norm=norm(x.attn_post_norm), mlp_norm=norm(x.mlp_norm),
        mlp_post_norm=norm(x.mlp_post_norm)))
    return replace(changed, norm=norm(model.norm), embed_norm=norm(model.embed_norm))


def set_window(model: Model, window: int | None) -> Model:
    """Tokens that every layer sees; None for all."""
    return each_attention(model, lambda a: replace(a, window=window), "window")


def set_theta(model: Model, theta: float) -> Model:
    """Base of every rotation."""
    if not any(layer.attn and layer.attn.rope for layer in model.layers):
        raise impossible("this model has no RoPE")
    return each_layer(model, lambda x: replace(
        x, attn=replace(x.attn, rope=replace(x.attn.rope, theta=theta))) if x.attn and x.attn.rope else x)


def set_positions(model: Model, kind: str) -> Model:
    """How positions enter: exactly one way, the others are taken out."""
    rows = model.context.usable
    if kind == "learned" and rows is None:
        raise impossible("learned positions need a table length, and this config names no context")
    table: LearnedPositions | SinusoidalPositions | None = None
    if kind == "learned":
        table = LearnedPositions(rows=rows or 0, dim=model.hidden)
    elif kind == "sinusoidal":
        table = SinusoidalPositions(dim=model.hidden)

    def one(a: Attention) -> Attention:
        rope = (a.rope or Rope(dim=a.head_dim, theta=10000.0)) if kind == "rope" else None
        return replace(a, rope=rope, alibi=kind == "alibi")

    return replace(each_attention(model, one, "positions"), positions=table)


def set_biases(model: Model, on: bool) -> Model:
    """Biases on q, k, v, o and every feed-forward matrix, or none of them; those of norms belong to the norm."""
    changed = each_attention(model, lambda a: replace(a, qkv_bias=on, o_bias=on), "biases")
    return each_mlp(changed, lambda m: replace(m, bias=on), expert=True)


def set_hidden(model: Model, n: int) -> Model:
    """Width of the stream; heads keep their head_dim and feed-forwards their width."""
    old = model.hidden
    if model.extra:
        raise impossible("hidden cannot be changed here: this model has tensors of a width of their own")

    def norm(x: Norm | None) -> Norm | None:
        return replace(x, dim=n) if x is not None and x.dim == old else x

    def mlp(m: MLP) -> MLP:
        return replace(m, hidden=n)

    def one(x: Layer) -> Layer:
        if x.state is not None or x.extra or not isinstance(x.attn, Attention):
            raise impossible("hidden cannot be changed here: this model has parts of a width of their own")
        ff = x.mlp
        if isinstance(ff, MoE):
            ff = replace(ff, hidden=n, expert=mlp(ff.expert), shared=mlp(ff.shared) if ff.shared else None)
        elif ff is not None:
            ff = mlp(ff)
        return replace(x, attn=replace(x.attn, hidden=n), mlp=ff, attn_norm=norm(x.attn_norm),
                       attn_post_norm=norm(x.attn_post_norm), mlp_norm=norm(x.mlp_norm),
                       mlp_post_norm=norm(x.mlp_post_norm))

    changed = each_layer(model, one)
    scale = model.embed.scale
    if scale is not None and abs(scale / model.hidden**0.5 - 1) < 1e-12:  # one that follows the width (Gemma)
        scale = n**0.5
    positions = replace(model.positions, dim=n) if model.positions else None
    return replace(changed, hidden=n, embed=replace(model.embed, dim=n, scale=scale), norm=norm(model.norm),
                   embed_norm=norm(model.embed_norm), head=replace(model.head, hidden=n), positions=positions)


def set_head_dim(model: Model, n: int) -> Model:
    """Width of every head; the same share of it rotates, and norms on q and k follow."""

    def norm(x: Norm | None, heads: int, old: int) -> Norm | None:
        if x is None:
            return None
        return replace(x, dim=n if x.dim == old or x.heads else heads * n)

    def one(a: Attention) -> Attention:
        rope = replace(a.rope, dim=a.rope.dim * n // a.head_dim // 2 * 2) if a.rope else None
        return replace(a, head_dim=n, rope=rope, q_norm=norm(a.q_norm, a.n_heads, a.head_dim),
                       k_norm=norm(a.k_norm, a.n_kv_heads, a.head_dim))

    return each_attention(model, one, "head_dim")


def set_context(model: Model, n: int) -> Model:
    """Positions the model is made for; a learned table grows or shrinks with them."""
    table = model.positions
    if isinstance(table, LearnedPositions):
        table = replace(table, rows=n)
    return replace(model, positions=table, context=Context(trained=n, usable=n, why=f"edited: context={n}"))
