"""What `llamactl generate` reports: the text, how fast it came, and what would fit where it did not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llamactl.analysis.dtypes import named
from llamactl.analysis.fit import largest
from llamactl.analysis.flops import elements_read
from llamactl.errors import OutputError
from llamactl.spec.int8 import in_int8
from llamactl.spec.model import Model
from llamactl.spec.parts import MoE


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """How tokens were drawn. temperature 0: the likeliest one; top_k 0: from all. seed: gives the same text again."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """What int8 changed on this text: KL(dtype || int8) in nats over `positions` next-token distributions.

    top1_agreement: share of positions whose likeliest token is the same.
    """

    positions: int
    mean_kl: float
    max_kl: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReport:
    """One text that a model wrote.

    text: without end tokens and without the stop string; None where no tokenizer turns the ids into text. logprobs:
    natural logarithms, of each of token_ids, by the network alone, before temperature; None where not asked for.
    stop: end | stop | length | context. quant: int8 where the matrices are in 8 bits, None where all is in dtype;
    quant_quality: what that changed on the first 256 tokens of prompt and text, measured.
    processes: that shared the model. prefill_seconds: the prompt's logits; first_token_seconds: from the same start to
    the first token; decode_seconds: the tokens after the first, without the time to print them. Rates are None where
    nothing was timed. kv_cache_bytes: of all the tokens that there is room for, in all processes.
    decode_bytes_per_token: weights and cache that the last token had to read. peak_memory_bytes: tensors on a GPU; on a
    CPU the whole process, with the mapped files; of several processes the largest. bandwidth_bytes_per_second: measured
    by reading; bandwidth_share: of it, used while decoding; both for one process alone.
    """

    id: str
    family: str
    model_type: str
    text: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    stop: str
    sampling: Draw
    device: str
    device_name: str
    dtype: str
    quant: str | None
    quant_quality: Quality | None
    processes: int
    prompt_tokens: int
    generated_tokens: int
    load_seconds: float
    prefill_seconds: float
    first_token_seconds: float | None
    decode_seconds: float
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    weights_bytes: int
    kv_cache_bytes: int
    decode_bytes_per_token: int
    peak_memory_bytes: int | None
    bandwidth_bytes_per_second: float | None
    bandwidth_share: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)


def text_params(model: Model) -> int:
    """Parameters of the decoder alone: towers and projectors are not run."""
    beside = sum(leaf.elements for s in model.sections for leaf in s.leaves if leaf.kind == "param")
    return model.total() - beside


def weights_bytes(model: Model, dtype: str, *, int8: bool = False, read: bool = False) -> int:
    """Bytes of the decoder's weights in `dtype`, with int8 its matrices in 8 bits and a scale for each of their rows.

    read: only what one token meets: of the routed experts those chosen, of the embedding not its table but the head.
    """
    size = named(dtype).bytes
    beside = sum(leaf.elements for leaf in model.outer_leaves() if leaf.kind == "param") - sum(
        leaf.elements for s in model.sections for leaf in s.leaves if leaf.kind == "param")
    if read:
        beside = model.head.vocab * model.head.hidden + sum(
            leaf.elements for leaf in model.outer_leaves() if leaf.role in ("norms", "other"))
    total = size(beside)
    for layer, n in model.distinct_layers():
        for leaf in layer.leaves():
            one, copies = leaf.elements // leaf.copies, leaf.copies
            if read and leaf.role == "feed_forward.routed_experts" and isinstance(layer.mlp, MoE):
                copies = copies * layer.mlp.top_k // layer.mlp.n_experts
            small = int8 and in_int8(leaf.path, leaf.shape, leaf.role)
            total += n * copies * (one + size(leaf.shape[0]) if small else size(one)) * (leaf.kind == "param")
    return total


def bytes_read(model: Model, dtype: str, ctx: int, *, int8: bool = False) -> int:
    """Bytes of weights and cache that one more token at position `ctx` reads; the cache is in `dtype`."""
    _, cache = elements_read(model, max(1, ctx), 1, 1)
    return weights_bytes(model, dtype, int8=int8, read=True) + named(dtype).bytes(cache)


def kv_bytes(model: Model, dtype: str, ctx: int) -> int:
    """Bytes that the network keeps for one sequence of `ctx` tokens; windows save time there, no memory."""
    kept = [layer.attn.cache() for layer in model.layers if layer.attn]
    return ctx * named(dtype).bytes(sum(c.elements for c in kept))


def needed(model: Model, *, dtype: str, ctx: int, stored: str | None, device: str, int8: bool = False) -> int:
    """Bytes that weights and cache take of the device's memory; a file mapped as it lies there takes none of it.

    stored: the dtype of the file, None for one that nothing computes in.
    """
    mapped = device == "cpu" and stored == dtype and not int8
    return (0 if mapped else weights_bytes(model, dtype, int8=int8)) + kv_bytes(model, dtype, ctx)


def shortage(model: Model, *, dtype: str, ctx: int, stored: str | None, device: str, free: int | None,
             int8: bool = False) -> OutputError:
    """The error for a run that memory does not hold, with what would fit.

    free: bytes that the device had to give; None where it does not say.
    """
    weights, cache = weights_bytes(model, dtype, int8=int8), kv_bytes(model, dtype, ctx)
    has = "" if free is None else f"; {free:,} B are free"
    mapped = ", mapped from disk" if device == "cpu" and stored == dtype and not int8 else ""
    return OutputError("memory", f"out of memory on {device}: {weights:,} B of {'int8' if int8 else dtype} weights"
                       f"{mapped}, {cache:,} B of KV cache for {ctx:,} tokens{has}",
                       help=_way_out(model, dtype, ctx, stored, device, free, int8))


def _way_out(model: Model, dtype: str, ctx: int, stored: str | None, device: str, free: int | None,
             int8: bool) -> str:
    """The mildest change that fits: fewer tokens, else a smaller dtype, else another model."""
    if free is not None:
        def takes(word: str, n: int, int8: bool = int8) -> int:
            return needed(model, dtype=word, ctx=n, stored=stored, device=device, int8=int8)

        most = largest(lambda n: takes(dtype, n) <= free)
        if most >= ctx:
            return "weights and cache would fit, what is computed beside them does not: shorten the prompt"
        if most:
            return f"weights and cache fit up to {most:,} tokens of prompt and text: lower --max-new"
        for word in ("bf16", "fp16") if dtype == "fp32" else ():
            if takes(word, ctx) <= free:
                return f"--dtype {word} takes {takes(word, ctx):,} B and fits"
        if not int8 and takes("bf16", ctx, True) <= free:
            return f"--quant int8 takes {takes('bf16', ctx, True):,} B and fits"
    return "choose a smaller model or another --device; llamactl fit says what fits where"
