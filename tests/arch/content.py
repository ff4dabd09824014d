"""Does each canonical tensor hold what its name says? Judged by the transformers module at work, never by names.

Names, shapes and round trips cannot see a square matrix left untransposed, q and k exchanged, or fused rows read in
another order. So a model is run on every token of its vocabulary, each alone at position 0, where rotary positions
turn nothing and attention returns v; what its modules take and give is noted; and every part of llamactl's Model is
computed again from canonical tensors and compared, each from the noted input, so that the first fault is the one
named. Modules are found by their class, not by the names that the tables under test hold.

shapes: T tokens (or patches), H heads, D head_dim
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from llamactl import arch
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Layer, Model, Section
from llamactl.spec.naming import Rule, read, stored_tensors
from llamactl.spec.parts import MLP, Attention, MoE, Norm

make_golden: Any = sys.modules["llamactl_tests_make_golden"]
state_content: Any = sys.modules["llamactl_tests_state_content"]
gemma_content: Any = sys.modules["llamactl_tests_gemma_content"]
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = json.loads((Path(__file__).parent / "variants.json").read_text())

Claim = tuple[str, Tensor, Tensor]  # what, computed from canonical tensors, seen in transformers
Seen = dict[str, dict[str, Any]]
Call = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any], Tensor]  # a module, what it got, what it gave


@dataclass(frozen=True, kw_only=True)
class Built:
    """One tiny model twice: as llamactl describes it, and what transformers stores and computes.

    written: the config.json that transformers saved beside the weights. total: its own parameters, tied ones once.
    """

    model: Model
    written: dict[str, Any]
    total: int
    header: dict[str, tuple[tuple[int, ...], str]]
    stored: dict[str, Tensor]
    seen: Seen


@cache
def built(name: str) -> Built:
    """The golden `name`, or a variant: a golden with a few keys changed, made on the spot."""
    golden, changes = VARIANTS.get(name, (name, {}))
    config = {**json.loads((GOLDEN / golden / "config.json").read_text()), **changes}
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "config.json").write_text(json.dumps(config))
        with warnings.catch_warnings():  # Llama 4's vision rotation is complex; here it is looked at only where it is 1
            warnings.filterwarnings("ignore", "Casting complex values")
            hf = make_golden.build(Path(tmp))
        hf.save_pretrained(tmp)
        written = json.loads((Path(tmp) / "config.json").read_text()) | {"model_type": config["model_type"]}
        stored = {k: v for file in sorted(Path(tmp).glob("*.safetensors")) for k, v in load_file(file).items()}
    header = {k: (tuple(v["shape"]), v["kind"]) for k, v in make_golden.header(hf).items()}
    total = sum(p.numel() for p in set(make_golden.trained(hf).values()))
    return Built(model=arch.describe(config, name), written=written, total=total, header=header, stored=stored,
                 seen=watch(hf))


# --- what transformers computes


def watch(hf: nn.Module) -> Seen:
    """What goes in and comes out of every part, by canonical path of the part."""
    seen: Seen = defaultdict(dict)
    with torch.no_grad(), ExitStack() as stack:
        lm = make_golden.decoder(hf)
        for module in lm.modules():  # YaRN and longrope scale cos and sin; without that, position 0 is the identity
            for name in [n for n in vars(module) if n.endswith("attention_scaling")]:
                setattr(module, name, 1.0)
        turned = getattr(lm.config.get_text_config(), "rope_parameters", None) or {}
        turned |= dict.fromkeys(turned.keys() & {"short_mscale", "long_mscale"}, 1.0)  # Phi-3.5-MoE keeps it here
        layers = find(lm, r"(DecoderLayer|GPTNeoXLayer|(Mamba2?|NemotronH|GPT2|GPTBigCode|GPTJ|Bloom|Mpt|Dbrx)Block)$")
        parts = {f"layers.{i}": layer for i, layer in enumerate(layers)}
        tower = next((m for m in hf.children() for m in (m, *m.children())
                      if re.match("Siglip|Llama4Vision", type(m).__name__)), None)
        if tower is not None:
            parts |= {f"vision.layers.{i}": layer for i, layer in enumerate(find(tower, "EncoderLayer$"))}
        for at, layer in parts.items():
            stack.enter_context(watch_layer(layer, seen[at]))
        head = lm.get_output_embeddings()
        stack.enter_context(hooked(head, seen["head"], "in", "out"))
        vocab = lm.get_input_embeddings().weight.shape[0]
        ids, rows = torch.arange(vocab), torch.arange(vocab) % 64  # 64: GPT-2's table
        turns = {"position_ids": rows[:, None]} if re.match("GPT2|GPTBigCode|OPT", type(lm).__name__) else {}
        if crossing := [at for at, layer in parts.items() if "CrossAttention" in type(layer).__name__]:
            turns["cross_attention_states"] = torch.randn(vocab, 1, hf.config.get_text_config().hidden_size)
            for at in crossing:
                seen[at]["states"] = turns["cross_attention_states"].flatten(0, 1)
        gemma_content.watch_streams(sys.modules[__name__], lm, seen["embed"], stack)
        lm(ids[:, None], use_cache=False, **turns)
        seen["embed"] |= {"ids": ids, "rows": rows, "scaled": "MiniCPM3" in type(lm).__name__}  # before the head
        if tower is not None:
            watch_tower(hf, tower, seen, stack)
        elif hasattr(hf, "get_image_features") or hasattr(getattr(hf, "model", None), "vision_model"):
            watch_picture(hf, seen)
    for i, layer in enumerate(layers):
        for mlp in children(layer, MLP_CLASS):
            watch_experts(mlp, seen[f"layers.{i}"])
        if gemma_content.is_gemma(layer):
            gemma_content.watch_experts(layer, seen[f"layers.{i}"])
        for mixer in children(layer, state_content.MIXER_CLASS):
            state_content.watch_state(mixer, seen[f"layers.{i}"])
    return {k: dict(v) for k, v in seen.items()}


CORRECTION = ("e_score_correction_bias", "expert_bias")
MLP_CLASS = r"(MLP|Moe|MoE|MoeBlock|FFN)$"


def find(module: nn.Module, cls: str) -> nn.ModuleList:
    """The list of blocks inside `module`."""
    for m in module.modules():
        if isinstance(m, nn.ModuleList) and re.search(cls, type(m[0]).__name__):
            return m
    raise LookupError(f"{type(module).__name__} has no list of {cls}: add the class of its blocks here")


def child(module: nn.Module, cls: str) -> nn.Module:
    (one,) = children(module, cls)
    return one


def children(module: nn.Module, cls: str) -> list[nn.Module]:
    return [m for m in module.children() if re.search(cls, type(m).__name__)]


@contextmanager
def hooked(module: nn.Module, into: dict[str, Any], before: str, after: str) -> Iterator[None]:
    """Note the first argument and the (first) result of every call; clones, since some code adds in place."""

    def flat(x: Tensor) -> Tensor:
        return x.detach().clone().flatten(0, -2)

    adds = list(signature(module.forward).parameters)[1:2] == ["residual"]  # Bloom and MPT add the stream inside

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        into[after] = flat(out[0] if isinstance(out, tuple) else out)
        if adds:
            into[after] -= flat(args[1])

    def pre(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        into[before] = flat(args[0] if args else next(iter(kwargs.values())))

    handles = (module.register_forward_pre_hook(pre, with_kwargs=True),
               module.register_forward_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def kept_by(m: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint keeps of `m` itself, not of the modules in it: its parameters and saved buffers."""
    saved = {n: b for n, b in m.named_buffers(recurse=False) if n not in m._non_persistent_buffers_set}
    return {**dict(m.named_parameters(recurse=False)), **saved}


@contextmanager
def called(module: nn.Module, into: list[Call]) -> Iterator[None]:
    """Note every call of the modules with parameters of their own inside `module`, in the order they are finished."""

    def hook(m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        out = out if isinstance(out, Tensor) else out[0]
        into.append((m, tuple(a.clone() if isinstance(a, Tensor) else a for a in args), kwargs, out.clone()))

    inside = [m for m in module.modules() if kept_by(m)]
    handles = [m.register_forward_hook(hook, with_kwargs=True) for m in inside]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def watch_layer(layer: nn.Module, s: dict[str, Any]) -> Iterator[None]:
    """in, attn_in, attn_out, mlp_in, mlp_out, out of one block; a hybrid's may have one of the two alone."""
    outer, around = layer, children(layer, "NormAttentionNorm$")  # DBRX: attention between its two norms
    mlps, layer = children(layer, MLP_CLASS), around[0] if around else layer
    mixers = children(layer, f"Attention|{state_content.MIXER_CLASS}")
    assert len(mixers) <= 1, "a block with two mixers: watch each"
    with ExitStack() as stack:
        stack.enter_context(hooked(outer, s, "in", "out"))
        for mixer in mixers:
            stack.enter_context(hooked(mixer, s, "attn_in", "attn_out"))
        for mlp in mlps:
            stack.enter_context(hooked(mlp, s, "mlp_in", "mlp_out"))
        bare = [m for m in layer.children() if isinstance(m, nn.Linear)]
        if len(bare) == 2 and not mlps:  # OPT's feed-forward is no module of its own
            stack.enter_context(hooked(bare[0], s, "mlp_in", "_"))
            stack.enter_context(hooked(bare[1], s, "_", "mlp_out"))
        for attn in children(layer, "Attention"):
            stack.enter_context(watch_attention(attn, s))
        if gemma_content.is_gemma(layer):
            stack.enter_context(gemma_content.watch(sys.modules[__name__], layer, s))
        yield


@contextmanager
def watch_attention(attn: nn.Module, s: dict[str, Any]) -> Iterator[None]:
    """q, k, v and what is mixed of them."""
    code = sys.modules[type(attn).__module__]
    s["l2"] = getattr(attn, "qk_norm", None)
    s["evens_first"] = hasattr(code, "apply_rotary_pos_emb_interleave") and getattr(
        attn.config, "rope_interleave", True)
    s["still"] = slice(-1, None) if "Llama4Vision" in type(attn).__name__ else slice(None)  # its class token only

    def note(q: Tensor, k: Tensor, v: Tensor) -> None:
        for name, x in zip("qkv", (q, k, v), strict=True):
            s[name] = x.transpose(1, 2).flatten(0, 1).clone()

    with ExitStack() as stack:
        for indexer in [m for m in attn.children() if type(m).__name__.endswith("Indexer")]:
            stack.enter_context(called(indexer, s.setdefault("indexer", [])))
        if hasattr(attn, "_split_heads"):  # Falcon computes attention itself; one token's attention is its v
            split = attn._split_heads

            def falcon(fused: Tensor) -> tuple[Tensor, ...]:
                q, k, v = split(fused)
                note(*(x.transpose(1, 2) for x in (q, k, v)))
                s["mixed"] = v.expand(q.shape).flatten(2).flatten(0, 1)
                return q, k, v

            stack.enter_context(patch.object(attn, "_split_heads", falcon))
        if hasattr(attn, "_reshape"):  # Bloom too
            cut = attn._reshape

            def bloom(fused: Tensor) -> tuple[Tensor, ...]:
                q, k, v = cut(fused)
                note(q, k, v)
                s["mixed"] = v.transpose(1, 2).flatten(2).flatten(0, 1)
                return q, k, v

            stack.enter_context(patch.object(attn, "_reshape", bloom))
        if type(attn).__name__ == "MptAttention":
            stack.enter_context(products(attn, note, s))
        for name in [n for n in vars(code) if n.endswith("eager_attention_forward")]:
            stack.enter_context(patch.object(code, name, noting(getattr(code, name), attn, note, s)))
        yield


@contextmanager
def products(attn: nn.Module, note: Any, s: dict[str, Any]) -> Iterator[None]:
    """The two matrix products of an attention that writes them out: q with k, and the weights with v."""
    product, seen, inside = torch.matmul, [], []

    def call(a: Tensor, b: Tensor) -> Tensor:
        out = product(a, b)
        if inside:
            seen.append((a, b, out))
        return out

    def after(*_: Any) -> None:
        (q, k, _), (_, v, mixed) = seen
        note(q, k.transpose(-1, -2), v)
        s["mixed"] = mixed.transpose(1, 2).flatten(2).flatten(0, 1).clone()
        inside.clear()

    handles = attn.register_forward_pre_hook(lambda *_: inside.append(True)), attn.register_forward_hook(after)
    try:
        with patch.object(torch, "matmul", call):
            yield
    finally:
        for handle in handles:
            handle.remove()


def noting(eager: Any, attn: nn.Module, note: Any, s: dict[str, Any]) -> Any:
    """transformers' own attention function, noting what `attn` passes and gets."""

    def call(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixed, weights = eager(module, q, k, v, *args, **kwargs)
        if module is attn:
            note(q, k, v)
            s["mixed"], s["scaling"] = mixed.flatten(-2).flatten(0, 1).clone(), kwargs.get("scaling")
        return mixed, weights

    return call


def watch_experts(mlp: nn.Module, s: dict[str, Any]) -> None:
    """For a mixture: logits of its router, each expert's output for every token, and what is added beside them."""
    inside = {type(m).__name__: m for m in mlp.children()}
    experts = next((m for n, m in inside.items() if "Experts" in n), None)
    if experts is None:
        return
    router = next(m for n, m in inside.items() if "Router" in n)
    x, n = s["mlp_in"], experts.down_proj.shape[0] if hasattr(experts, "down_proj") else experts.num_experts
    state = {**dict(mlp.named_buffers()), **dict(mlp.named_parameters())}
    correction = next((v.detach().flatten() for k, v in state.items() if k.endswith(CORRECTION)), None)
    takes = any(k.endswith(CORRECTION) for k in signature(router.forward).parameters)  # kept outside it
    out = router(x, correction) if takes else router(x)
    if isinstance(out, Tensor) and hasattr(mlp, "route_tokens_to_experts"):  # DBRX
        out = out, *mlp.route_tokens_to_experts(out)
    llama4 = "Llama4" in type(mlp).__name__
    with torch.no_grad():
        s["router"] = out[1 if llama4 else 0].detach()
        s["correction"] = correction
        if llama4:
            s["experts"] = experts(x.repeat(n, 1)).view(n, *x.shape)
            routed = experts(x.repeat(n, 1) * out[0].T.reshape(-1, 1)).view(n, *x.shape).sum(0)
        else:
            one = torch.ones(len(x), 1)
            s["experts"] = torch.stack([experts(x, torch.full((len(x), 1), e), one).view(x.shape) for e in range(n)])
            routed = experts(x, out[2], out[1].to(x.dtype)).view(x.shape)
        s["beside"] = s["mlp_out"] - routed


def watch_tower(hf: nn.Module, tower: nn.Module, seen: Seen, stack: ExitStack) -> None:
    """The vision tower on a random picture, then the projector on what it gives."""
    v, own = seen["vision"], {type(m).__name__: m for m in tower.children()}
    v["pixels"] = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    for name, module in own.items():
        if name in ("SiglipVisionEmbeddings", "Llama4VisionPixelShuffleMLP"):
            stack.enter_context(hooked(module, v, f"{name}.in", f"{name}.out"))
        if name == "Llama4VisionPixelShuffleMLP":
            stack.enter_context(hooked(module.mlp, v, "mlp.in", "mlp.out"))
    out = tower(v["pixels"]).last_hidden_state
    v["out"] = out.detach().flatten(0, -2)
    projector = child(next(m for m in hf.modules() if any("Projector" in type(c).__name__ for c in m.children())),
                      "Projector")
    for norm in projector.children():
        stack.enter_context(hooked(norm, seen["projector"], "norm.in", "norm.out"))
    stack.enter_context(hooked(projector, seen["projector"], "in", "out"))
    projector(out)


def watch_picture(hf: nn.Module, seen: Seen) -> None:
    """Every call inside the towers and projectors of a vision-language model, on a picture of 28 x 28 random pixels."""
    calls: list[Call] = []
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(3))
    asked = signature(hf.get_image_features).parameters if hasattr(hf, "get_image_features") else {}
    more: dict[str, Any] = {}
    if "Kimi" in type(hf).__name__:
        pixels, more = pixels.reshape(-1)[:588].view(4, 3, 7, 7), {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    elif "image_grid_thw" in asked:  # Qwen cuts 2 frames of 14 x 14 pixels into 2 x 2 patches
        pixels, more = pixels.reshape(-1)[:1176].view(4, 294), {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    elif "image_position_ids" in asked:
        grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
        pixels, more = pixels.reshape(1, 16, 147), {"image_position_ids": grid}
    elif "Gemma3n" in type(hf).__name__:
        more["embedders"] = (hf.model.embed_vision, hf.model.embed_audio)
    elif "image_sizes" in asked:
        more = {"image_sizes": torch.tensor([[28, 28]])}
    with ExitStack() as stack:
        for m in hf.model.children():
            if m is not hf.model.language_model:
                stack.enter_context(called(m, calls))
        for embedder in more.get("embedders", ()):  # its towers are left out: the last token, then features, for each
            embedder(input_ids=torch.tensor([[embedder.vocab_offset + embedder.vocab_size - 1]]))
            embedder(inputs_embeds=torch.randn(1, 4, embedder.multimodal_hidden_size))
        if asked and "embedders" not in more:
            hf.get_image_features(pixels, **more)
        elif not asked:  # Llama 3.2 Vision: one picture of two tiles, under the last aspect ratio
            out = hf.model.vision_model(pixels.expand(1, 1, 2, 3, 28, 28), torch.tensor([[3]]), torch.ones(1, 1, 2))
            hf.model.multi_modal_projector(out.last_hidden_state)
    last = {id(m) for m in hf.model.children() if isinstance(m, nn.Linear)} | {id(x) for m in hf.modules()
        if re.search(r"(Projector|Projection|Merger|MultimodalEmbedder)$", type(m).__name__) for x in m.modules()}
    once: dict[int, Call] = {}
    for call in calls:
        once.setdefault(id(call[0]), call)
    calls = fused_calls(hf, list(once.values()))
    seen["sections"] |= {"vision": [c for c in calls if id(c[0]) not in last],
                         "projector": [c for c in calls if id(c[0]) in last]}


def fused_calls(hf: nn.Module, calls: list[Call]) -> list[Call]:
    """Kimi stores q, k and v of its tower as one, neighbouring pairs turning; transformers splits and turns halves."""
    owner = {id(x): m for m in hf.modules() if type(m).__name__ == "Kimi_K25VisionAttention" for x in m.children()}
    out, n = [], 0
    while n < len(calls):
        attn = owner.get(id(calls[n][0]))
        if attn is None or calls[n][0] is attn.proj:
            out.append(calls[n])
            n += 1
            continue
        q, k, v = (c[3] for c in calls[n:n + 3])
        pairs = [x.unflatten(-1, (attn.num_heads, 2, -1)).transpose(-1, -2).flatten(-3) for x in (q, k)]
        out.append((nn.Linear(q.shape[-1], 3 * q.shape[-1]), *calls[n][1:3], torch.cat((*pairs, v), -1)))
        n += 3
    return out


# --- the same from canonical tensors


class Canonical(dict[str, Tensor]):
    """Canonical tensors by name; remembers which were used."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        return super().__getitem__(name)


ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu,
               "relu2": lambda x: F.relu(x).square()}


def linear(t: Canonical, at: str, x: Tensor, bias: bool = False) -> Tensor:
    return F.linear(x, t[f"{at}.weight"], t[f"{at}.bias"] if bias else None)


def normed(norm: Norm | None, t: Canonical, at: str, x: Tensor) -> Tensor:
    """x under `norm`, x itself where there is none. A norm for each head takes (T, H, D)."""
    if norm is None:
        return x
    paths = [f"{at}.{e}" for e in range(norm.heads)] if norm.heads else [at]
    weight, bias = (
        torch.stack([t[f"{p}.{leaf}"] for p in paths]).squeeze(0) if there else None
        for leaf, there in (("weight", norm.weight), ("bias", norm.bias))
    )
    if norm.kind == "layer":
        x = F.layer_norm(x, x.shape[-1:], eps=norm.eps)
    else:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps)
    if weight is not None:
        x = x * (weight + 1 if norm.offset else weight)
    return x if bias is None else x + bias


def layer_claims(layer: Layer, at: str, t: Canonical, s: dict[str, Any]) -> Iterator[Claim]:
    """One block, each branch from the input that transformers gave it."""
    lib = sys.modules[__name__]
    if "calls" in s:
        yield from gemma_content.altup_claims(lib, layer, at, t, s)
        return
    x, a, m = s["in"], s.get("attn_out"), s.get("mlp_out")
    if a is not None:
        yield "attn_norm", normed(layer.attn_norm, t, f"{at}.attn_norm", x), s["attn_in"]
    if isinstance(layer.attn, LatentAttention):
        yield from latent_claims(layer.attn, f"{at}.attn", t, s)
    elif isinstance(layer.attn, Attention):
        yield from attention_claims(layer.attn, f"{at}.{'cross' if layer.attn.cross else 'attn'}", t, s)
    elif layer.attn is not None:
        raise TypeError(f"nothing here computes a {type(layer.attn).__name__}: add its claims")
    if layer.state:
        assert not layer.attn, "a block with two mixers: claim their sum"
        yield from state_content.claims(layer.state, f"{at}.state", t, s)
    scale = layer.residual_scale or 1.0

    gated = {leaf.path for leaf in layer.extra}

    def added(x: Tensor, norm: Norm | None, name: str, branch: Tensor) -> Tensor:
        if layer.post_residual:
            return normed(norm, t, f"{at}.{name}_post_norm", x + scale * branch)
        factor = torch.tanh(t[f"{at}.{name}_gate"]) if f"{name}_gate" in gated else scale
        return x + factor * normed(norm, t, f"{at}.{name}_post_norm", branch)

    stream = x if a is None else added(x, layer.attn_post_norm, "attn", a)
    if layer.mlp is None:
        yield "out", stream, s["out"]
        return
    if layer.parallel:
        fed = normed(layer.mlp_norm, t, f"{at}.mlp_norm", x) if layer.mlp_norm else s["attn_in"]
    else:
        fed = normed(layer.mlp_norm, t, f"{at}.mlp_norm", stream)
    yield "mlp_norm", fed, s["mlp_in"]
    if isinstance(layer.mlp, MoE) and "experts_in" in s:
        yield from gemma_content.moe_claims(lib, layer.mlp, f"{at}.mlp", t, s, stream)
    elif isinstance(layer.mlp, MoE):
        yield from moe_claims(layer.mlp, f"{at}.mlp", t, s)
    else:
        yield "mlp", feed_forward(layer.mlp, f"{at}.mlp", t, s["mlp_in"]), m
    if "per_layer" in s:
        out = added(stream, layer.mlp_post_norm, "mlp", gemma_content.mixed(lib, layer, at, t, s))
        yield "out", gemma_content.tail(lib, layer, at, t, s, out), s["out"]
        return
    yield "out", added(stream, layer.mlp_post_norm, "mlp", m), s["out"]


def attention_claims(attn: Attention, at: str, t: Canonical, s: dict[str, Any]) -> Iterator[Claim]:
    x, still = s["attn_in"], s["still"]
    for one, heads, norm in (("q", attn.n_heads, attn.q_norm), ("k", attn.n_kv_heads, attn.k_norm),
                             ("v", attn.n_kv_heads, attn.v_norm))[:1 if attn.shares_kv else 3]:
        made_by = "k" if one == "v" and attn.v_from_k else one
        ours = linear(t, f"{at}.{made_by}", s["states"] if attn.cross and one in "kv" else x, attn.qkv_bias)
        if norm and norm.dim != attn.head_dim:
            ours, norm = normed(norm, t, f"{at}.{one}_norm", ours), None
        ours = normed(norm, t, f"{at}.{one}_norm", ours.view(len(x), heads, attn.head_dim))
        if s["l2"] is not None and one in "qk":
            ours = s["l2"](ours)
        theirs = s[one]
        if attn.clip:
            ours = ours.clamp(-attn.clip, attn.clip)
        if one == "q" and attn.scale is None and s.get("scaling") == 1.0:  # OPT scales q before it is handed on
            ours = ours * attn.head_dim**-0.5
        ours = ours.repeat_interleave(theirs.shape[1] // heads, 1)
        yield one, ours[still if one in "qk" else slice(None)], theirs[still if one in "qk" else slice(None)]
    if attn.sinks:  # a softmax over one score and the sink
        k, v = (s[c].repeat_interleave(attn.n_heads // attn.n_kv_heads, 1) for c in "kv")
        score = (s["q"] * k).sum(-1) * s["scaling"]
        yield "sinks", (torch.sigmoid(score - t[f"{at}.sinks"])[..., None] * v).flatten(1), s["mixed"]
    mixed = s["mixed"]
    if attn.gated:
        mixed = mixed * torch.sigmoid(linear(t, f"{at}.gate", x, attn.qkv_bias))
    yield "o", linear(t, f"{at}.o", mixed, attn.o_bias), s["attn_out"]


def latent_claims(attn: LatentAttention, at: str, t: Canonical, s: dict[str, Any]) -> Iterator[Claim]:
    x, heads = s["attn_in"], attn.n_heads

    def turned(y: Tensor) -> Tensor:
        return torch.cat((y[..., ::2], y[..., 1::2]), -1) if s["evens_first"] else y

    if attn.q_rank is None:
        q = linear(t, f"{at}.q", x)
    else:
        q = linear(t, f"{at}.q_a", x, attn.bias)
        q = linear(t, f"{at}.q_b", normed(Norm(dim=attn.q_rank, eps=attn.eps), t, f"{at}.q_a_norm", q))
    q = q.view(len(x), heads, -1)
    yield "q", torch.cat((q[..., :attn.qk_nope], turned(q[..., attn.qk_nope:])), -1), s["q"]
    latent, rope = linear(t, f"{at}.kv_a", x, attn.bias).split((attn.kv_rank, attn.qk_rope), -1)
    latent = normed(Norm(dim=attn.kv_rank, eps=attn.eps), t, f"{at}.kv_a_norm", latent)
    k = linear(t, f"{at}.k_b", latent).view(len(x), heads, attn.qk_nope)
    yield "k", torch.cat((k, turned(rope)[:, None].expand(-1, heads, -1)), -1), s["k"]
    yield "v", linear(t, f"{at}.v_b", latent).view(len(x), heads, attn.v_dim), s["v"]
    if attn.indexer:
        yield from called_claims([f"{at}.indexer.{x.path}" for x in attn.indexer.leaves()], t, s["indexer"])
    yield "o", linear(t, f"{at}.o", s["mixed"], attn.bias), s["attn_out"]


def in_order(section: Section) -> Iterator[str]:
    """A section's tensors in the order it uses them: a row of blocks one block after the other."""
    for _, leaves in groupby(section.leaves, lambda x: x.path.partition("{i}")[0] if "{i}" in x.path else ""):
        row = list(leaves)
        for i in range(row[0].copies):
            yield from (x.path.replace("{i}", str(i)) for x in row)


def called_claims(paths: Sequence[str], t: Canonical, calls: Sequence[Call]) -> Iterator[Claim]:
    """Each of `paths`, tensors in the order they are used, put into the module that transformers called there."""
    modules = list(dict.fromkeys(path.rpartition(".")[0] for path in paths))
    for at, (module, args, kwargs, out) in zip(modules, calls, strict=True):
        theirs = kept_by(module)
        own = dict(zip(theirs, (t[p] for p in paths if p.rpartition(".")[0] == at), strict=True))
        assert [x.shape for x in own.values()] == [x.shape for x in theirs.values()]
        with torch.no_grad():
            ours = torch.func.functional_call(module, own, args, kwargs)
        yield at, ours if isinstance(ours, Tensor) else ours[0], out


def feed_forward(mlp: MLP, at: str, t: Canonical, x: Tensor) -> Tensor:
    up = linear(t, f"{at}.up", x, mlp.bias)
    if mlp.activation == "swigluoai":  # gpt-oss: clamped at 7, a sigmoid of 1.702 x, up + 1
        gate = linear(t, f"{at}.gate", x, mlp.bias).clamp(max=7.0)
        inner = (up.clamp(-7.0, 7.0) + 1) * gate * torch.sigmoid(1.702 * gate)
    elif mlp.gated:
        inner = ACTIVATIONS[mlp.activation](linear(t, f"{at}.gate", x, mlp.bias)) * up
    else:
        inner = ACTIVATIONS[mlp.activation](up)
    return linear(t, f"{at}.down", inner, mlp.bias)


def moe_claims(moe: MoE, at: str, t: Canonical, s: dict[str, Any]) -> Iterator[Claim]:
    x = s["mlp_in"]
    yield "router", linear(t, f"{at}.router", x, moe.router_bias), s["router"]
    if moe.correction_bias:
        yield "correction_bias", t[f"{at}.router.correction_bias"], s["correction"]
    for e in range(moe.n_experts):
        yield f"experts.{e}", feed_forward(moe.expert, f"{at}.experts.{e}", t, x), s["experts"][e]
    if moe.shared:
        shared = feed_forward(moe.shared, f"{at}.shared", t, x)
        yield "shared", torch.sigmoid(linear(t, f"{at}.shared_gate", x)) * shared if moe.shared_gate else shared, \
            s["beside"]


def claims(model: Model, t: Canonical, seen: Seen) -> Iterator[Claim]:
    """Everything that the canonical tensors of `model` can be held to."""
    e = seen["embed"]
    x = t["embed.weight"][e["ids"]] * (model.embed.scale or 1.0)
    if model.positions:
        if "project_in.weight" in t:
            x = linear(t, "project_in", x)
        x = x + t["pos_embed.weight"][e["rows"] + model.positions.offset]
    yield "embed", normed(model.embed_norm, t, "embed_norm", x), seen["layers.0"]["in"][:len(x)]
    yield from gemma_content.per_layer_claims(sys.modules[__name__], model, t, seen, x)
    for i, layer in enumerate(model.layers):
        for what, ours, theirs in layer_claims(layer, f"layers.{i}", t, seen[f"layers.{i}"]):
            yield f"layers.{i}.{what}", ours, theirs
    out = normed(model.norm, t, "norm", seen[f"layers.{model.n_layers - 1}"]["out"])
    if "project_out.weight" in t:
        out = linear(t, "project_out", out)
    if "merged" in e:  # Gemma 3n's streams
        out = normed(model.norm, t, "norm", e["merged"])
    yield "norm", out * ((model.head.scale or 1.0) if e["scaled"] else 1.0), seen["head"]["in"]
    matrix = t["embed.weight"] if model.tied else t["head.weight"]
    yield "head", F.linear(seen["head"]["in"], matrix, t["head.bias"] if model.head.bias else None), seen["head"]["out"]
    towers = [section for section in model.sections if section.name in ("vision", "projector")]
    if towers and "sections" in seen:
        for section in towers:
            yield from called_claims(list(in_order(section)), t, seen["sections"][section.name])
    elif towers:
        yield from vision_claims(t, seen)


def vision_claims(t: Canonical, seen: Seen) -> Iterator[Claim]:
    """SigLIP with Gemma 3's projector, or Llama 4's tower with its adapter."""
    v, p, llama4 = seen["vision"], seen["projector"], "vision.class" in t
    hidden, wide = t["vision.layers.0.attn.q.weight"].shape[0], t["vision.layers.0.mlp.up.weight"].shape[0]
    norm = Norm(dim=hidden, eps=1e-5 if llama4 else 1e-6, kind="layer", bias=True)
    block = Layer(
        attn=Attention(hidden=hidden, n_heads=3, n_kv_heads=3, head_dim=hidden // 3, qkv_bias=True, o_bias=True),
        mlp=MLP(hidden=hidden, ffn=wide, activation="gelu" if llama4 else "gelu_tanh", gated=False, bias=True),
        attn_norm=norm, mlp_norm=norm,
    )
    first, last = seen["vision.layers.0"]["in"], seen["vision.layers.1"]["out"]
    if llama4:
        patches = linear(t, "vision.patch", F.unfold(v["pixels"], 7, stride=7).mT)[0]
        stream = torch.cat((patches, t["vision.class"][None])) + t["vision.positions"]
        yield "vision.embed", normed(norm, t, "vision.pre_norm", stream), first
    else:
        patches = F.conv2d(v["pixels"], t["vision.patch.weight"], t["vision.patch.bias"], stride=7).flatten(2).mT[0]
        yield "vision.embed", patches + t["vision.positions.weight"], first
    for i in range(2):
        for what, ours, theirs in layer_claims(block, f"vision.layers.{i}", t, seen[f"vision.layers.{i}"]):
            yield f"vision.layers.{i}.{what}", ours, theirs
    out = normed(norm, t, "vision.norm", last)
    if llama4:
        yield "vision.norm", out[:-1], v["Llama4VisionPixelShuffleMLP.in"]
        inner = F.gelu(linear(t, "vision.adapter.up", v["mlp.in"]))
        yield "vision.adapter", F.gelu(linear(t, "vision.adapter.down", inner)), v["mlp.out"]
        yield "projector", F.linear(p["in"], t["projector.weight"]), p["out"]
    else:
        yield "vision.norm", out, v["out"]
        small = normed(Norm(dim=hidden, eps=1e-6, offset=True), t, "projector.norm", p["norm.in"])
        yield "projector", F.linear(small, t["projector.weight"]), p["out"]


# --- verdicts


def canonical(b: Built, rules: Sequence[Rule]) -> Canonical:
    """Every canonical tensor, read from the stored ones by `rules`."""
    out: dict[str, Tensor] = {}
    for s in stored_tensors(b.model, rules):
        out.update(read(s, b.stored[s.name], b.model))
    return Canonical(out)


def inventory(model: Model, rules: Sequence[Rule]) -> dict[str, tuple[tuple[int, ...], str]]:
    """{stored name: (shape, kind)} as `rules` say."""
    out = {}
    for s in stored_tensors(model, rules):
        (kind,) = {t.kind for t in s.of}
        out[s.name] = (s.shape, kind)
    return out


def wrong(b: Built, t: Canonical) -> str | None:
    """The first canonical tensor that is not what its name says, None if all are."""
    for tensor in b.model.tensors():
        if tuple(t.get(tensor.name, torch.empty(0)).shape) != tensor.shape:
            return f"shape of {tensor.name}"
    for what, ours, theirs in claims(b.model, t, b.seen):
        if ours.shape != theirs.shape:
            return f"shape of {what}: {tuple(ours.shape)}, not {tuple(theirs.shape)}"
        off = float((ours - theirs).abs().max() / theirs.abs().max())
        if not off < 1e-4:
            return f"content of {what}: off by {off:.2g} of the largest value"
    return None


def verdict(b: Built, rules: Sequence[Rule]) -> str | None:
    """What is wrong with `rules` as the names of this model; None where no check sees anything."""
    try:
        if inventory(b.model, rules) != b.header:
            return "names or shapes"
        return wrong(b, canonical(b, rules))
    except (KeyError, IndexError, ValueError, RuntimeError, AssertionError) as e:
        return f"refused with {type(e).__name__}"
