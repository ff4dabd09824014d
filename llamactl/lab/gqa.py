"""What do query heads that share keys and values save, and what do they cost?

Source: GQA, arXiv:2305.13245; MQA, arXiv:1911.02150; multi-head attention, arXiv:1706.03762.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from llamactl.analysis.experiment import Claim, Finding, Grid, Outcome, found, skipped
from llamactl.analysis.kvcache import kv_cache
from llamactl.lab._drawn import Drawn, network
from llamactl.lab._setting import NO_CHECKPOINT, Checkpoint, Setting
from llamactl.net.attention import SelfAttention
from llamactl.net.cache import Cache
from llamactl.spec.edits import apply
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.verify.ablate import Ablated, ablate

WIDTH, HEADS = 64, 8
TOKENS = 48
RUINED = 1.0  # nats per token
Trained = Sequence[tuple[Checkpoint, Ablated]]
PARAMETERS = ((8, 16_384, 16_448), (1, 9_216, 9_280))
CACHES = (("gpt2", (), 18_432), ("smollm2-135m", (), 11_520), ("smollm2-135m", ("n_kv_heads=9",), 34_560))
LONG, CONTEXT = "llama-3-8b", 8_192
BYTES = ((32, 4 << 30), (8, 1 << 30), (1, 128 << 20))  # KV heads, bytes in fp16
SMALL = ("n_layers=2", "hidden=64", "n_kv_heads=2", "n_heads=8", "head_dim=8", "ffn=96", "vocab=256")


def run(given: Setting) -> Outcome:
    """Equalities, parameters, caches and the loss of averaged heads."""
    trained = [(c, _ablated(c, given)) for c in given.checkpoints]
    return Outcome(
        claims=(Claim(claim="with a KV head for each query head it is multi-head attention, bit for bit",
                      formula="n_kv = n_q", findings=(_as_mha(given),)),
                Claim(claim="a copy with each KV head repeated gives the same logits to the last bit",
                      formula="K'_i = K_floor(i n_kv / n_q)", findings=tuple(_copies(given, trained))),
                Claim(claim="attention shrinks as KV heads go",
                      formula="2 d n_q D + 2 d n_kv D (+ d with a biased output projection)",
                      findings=tuple(_parameters())),
                Claim(claim="the cache holds 2 x layers x KV heads x head width elements a token",
                      formula="2 L n_kv D", findings=tuple(_caches(given))),
                Claim(claim="averaging the KV heads of a trained GQA model, without training, ruins it",
                      formula="loss(KV heads averaged) - loss, nats per token", findings=tuple(_averaged(trained)))),
        grids=(_grid(given),))


def _part(kv: int, bias: bool = False) -> Attention:
    return Attention(hidden=WIDTH, n_heads=HEADS, n_kv_heads=kv, head_dim=WIDTH // HEADS, o_bias=bias)


@torch.no_grad()
def _as_mha(given: Setting) -> Finding:
    """The network's attention against torch's own nn.MultiheadAttention with the same matrices."""
    net = network(given.small(LONG, *SMALL, f"n_kv_heads={HEADS}", "positions=none"), given.draws(), given.device)
    ours = net.layers[0].attn
    assert isinstance(ours, SelfAttention)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, bias=False, batch_first=True, device=given.device).eval()
    theirs.in_proj_weight.copy_(torch.cat([m.weight for m in (ours.q, ours.k, ours.v) if m is not None]))
    theirs.out_proj.weight.copy_(ours.o.weight)
    x = torch.randn(2, TOKENS, WIDTH, generator=given.draws()).to(given.device)
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, device=given.device)
    want: Tensor = theirs(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    got: Tensor = ours(x, net.step(TOKENS, 0))
    return _bits("output less torch.nn.MultiheadAttention's, largest", float((got - want).abs().max()),
                 torch.equal(got, want), of=f"drawn weights, {HEADS} heads of {WIDTH // HEADS}, {TOKENS} tokens")


def _bits(what: str, far: float, equal: bool, *, of: str, note: str | None = None) -> Finding:
    why = None if equal else "equal but for the order in which kernels sum here" if far < 1e-4 else None
    return found(what, far, of=of, expected=0.0, note="; ".join(x for x in (note, why) if x) or None)


def _ablated(c: Checkpoint, given: Setting) -> Ablated:
    """With its KV heads copied, and with all of them averaged into one where there are any."""
    given.tell(f"gqa: {c.id} with its KV heads copied and averaged")
    heads = all(isinstance(x.attn, Attention) for x in c.model.layers)
    return c.ablated(("n_kv_heads=1",) if heads else (), copies=True)


def _copies(given: Setting, trained: Trained) -> Iterator[Finding]:
    model = given.small(LONG, *SMALL)
    done = ablate(model, Drawn(model, given.draws()), _ids(given, TOKENS), edits=(), shifts=())
    assert done.kv_copy is not None
    yield _bits("logits less the copy's, largest", done.kv_copy.max_abs_dlogit or 0.0, done.kv_copy.bit_equal,
                of=f"drawn weights, {HEADS} heads on 2 KV heads", note=_sizes(*_both(model)))
    if not trained:
        yield skipped("logits less the copy's, largest", NO_CHECKPOINT)
    for c, ablated in trained:
        copy = ablated.kv_copy
        if copy is None:
            yield skipped("logits less the copy's, largest", "its query heads share no KV heads", of=c.id)
            continue
        far = float("nan") if copy.max_abs_dlogit is None else copy.max_abs_dlogit
        yield _bits("logits less the copy's, largest", far, copy.bit_equal, of=c.id,
                    note=_sizes(copy.params_copied, copy.params))


def _both(model: Model) -> tuple[int, int]:
    return apply(model, f"n_kv_heads={HEADS}").total(), model.total()


def _sizes(copied: int, own: int) -> str:
    return f"{copied:,} parameters for {own:,}"


def _ids(given: Setting, n: int) -> list[int]:
    return torch.randint(256, (n,), generator=given.draws()).tolist()


def _parameters() -> Iterator[Finding]:
    for kv, plain, biased in PARAMETERS:
        for bias, expected in ((False, plain), (True, biased)):
            yield found(f"{kv} KV head{'' if kv == 1 else 's'}{', biased output' if bias else ''}",
                        sum(x.elements for x in _part(kv, bias).leaves()),
                        of=f"d {WIDTH}, {HEADS} heads of {WIDTH // HEADS}", unit="parameters", expected=expected)


def _caches(given: Setting) -> Iterator[Finding]:
    """Elements of the tensors that the network caches in; how many of them a text wrote."""
    for name, edits, expected in CACHES:
        model = given.small(name, *edits)
        cache = Cache(model, 1, 1, dtype=torch.float16)
        held = sum(x.k.numel() + x.v.numel() for x in cache.layers if x is not None)
        by_formula = kv_cache(model, 1).elements_per_token_full
        yield found("elements a token", held, of=", ".join((name, *edits)), unit="elements", expected=expected,
                    note=None if by_formula == held else f"`kv-cache` says {by_formula:,}")
    for kv, expected in BYTES:
        model = given.small(LONG, f"n_kv_heads={kv}")
        cache = Cache(model, 1, CONTEXT, dtype=torch.float16, device="meta")  # its tensors, without their memory
        by_formula = kv_cache(model, CONTEXT, dtype="fp16").at[0].kv_cache_bytes
        yield found(f"{kv} KV head{'' if kv == 1 else 's'}, {CONTEXT:,} tokens in fp16", cache.nbytes, of=LONG,
                    unit="bytes", expected=expected,
                    note=None if by_formula == cache.nbytes else f"`kv-cache` says {by_formula:,}")
    yield _written(given)


@torch.inference_mode()
def _written(given: Setting) -> Finding:
    """Elements that a text leaves behind in an empty cache with room for more."""
    model = given.small(LONG, *SMALL)
    net = network(model, given.draws(), given.device)
    cache = Cache(model, 1, 2 * TOKENS, dtype=torch.float32, device=given.device)
    net(torch.tensor([_ids(given, TOKENS)], device=given.device), cache)
    written = sum(int(x.k.count_nonzero() + x.v.count_nonzero()) for x in cache.layers if x is not None)
    return found(f"written by {TOKENS} tokens, of each", written / TOKENS, unit="elements",
                 of="drawn weights, 2 KV heads of 8, 2 layers", expected=kv_cache(model, 1).elements_per_token_full)


def _averaged(trained: Trained) -> Iterator[Finding]:
    what = "one KV head, the mean of all: the loss rises by"
    if not trained:
        yield skipped(what, NO_CHECKPOINT, unit="nats per token")
    for c, done in trained:
        row = next(iter(done.rows), None)
        attn, why = c.model.layers[0].attn, c.unread(done.base_loss)
        if why or row is None or row.change is None or not isinstance(attn, Attention) or attn.n_kv_heads == 1:
            why = why or (row.note if row is not None else None) or "it has no KV heads to average"
            yield skipped(what, why, of=c.id, unit="nats per token")
            continue
        yield found("loss", done.base_loss, of=c.id, unit="nats per token")
        shared = attn.n_kv_heads < attn.n_heads  # the claim is of models whose query heads share them already
        yield found(what, row.change, of=c.id, unit="nats per token", relation=">=",
                    expected=RUINED if shared else None, ours=True,
                    note=f"{attn.n_kv_heads} KV heads of {attn.n_heads}; standard error {row.standard_error or 0:.2g}")


def _grid(given: Setting) -> Grid:
    """Parameters and cache as KV heads go."""
    rows = []
    for kv in (8, 4, 2, 1):
        plain, biased = (sum(x.elements for x in _part(kv, b).leaves()) for b in (False, True))
        long = kv_cache(given.small(LONG, f"n_kv_heads={kv}"), CONTEXT, dtype="fp16").at[0].kv_cache_bytes
        rows.append((kv, plain, biased, long))
    return Grid(title=f"as KV heads go: attention of d {WIDTH} with {HEADS} heads, and the cache of {LONG}",
                columns=("KV heads", "parameters", "with a biased output", f"bytes of {LONG} at {CONTEXT:,} in fp16"),
                rows=tuple(rows))
