"""Logits layer by layer: those of the whole network bit for bit, in little memory; and how logits are compared."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.net import divergence, streamed
from llamactl.net.decoder import build
from llamactl.net.divergence import compare_logits, loss, probe_ids
from llamactl.net.streamed import logits
from llamactl.net.weights import Weights, open_weights
from llamactl.spec.model import Model
from llamactl.spec.naming import stored_tensors
from llamactl.spec.parts import MoE

# Every kind of position, norm, block, head, window, attention and routing that runs, once or more.
SPREAD = ("bloom", "cohere", "cohere-qk-norm", "cohere2", "dbrx", "deepseek_v2", "deepseek_v3", "exaone4", "falcon",
          "falcon-new", "falcon-rw", "gemma", "gemma2", "gemma3", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox",
          "gpt_oss", "gptj", "granitemoe", "kimi_k2", "llama", "llama-bias-tied-llama3", "llama4_text", "minicpm3",
          "minimax_m2", "mixtral", "mpt", "nemotron", "olmo2", "opt", "phi", "phi3", "phimoe", "qwen2_moe", "qwen3_moe",
          "stablelm")
MEMORY = """
import json, re, sys, threading, time
import torch
from llamactl import arch
from llamactl.net.kernels import linear
from llamactl.net.streamed import logits
from llamactl.net.weights import open_weights

def anonymous():
    with open("/proc/self/status") as f:
        return int(re.search(r"RssAnon:\\s+(\\d+) kB", f.read())[1]) * 1024

torch.set_num_threads(1)
model = arch.describe(json.load(open(sys.argv[1] + "/config.json")), "config.json")
linear(torch.zeros(1, 8, 32), torch.zeros(32, 32), None)  # the kernels' own first use
idle, peak, done = anonymous(), [0], threading.Event()

def watch():
    while not done.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.0005)

watcher = threading.Thread(target=watch)
watcher.start()
weights = open_weights(sys.argv[1], model, arch.names(model), layout="hf", ignored=arch.ignored(model))
out = logits(model, weights, torch.arange(64)[None])
done.set()
watcher.join()
print(json.dumps({"peak": peak[0] - idle, "result": out.nbytes, "finite": bool(torch.isfinite(out).all())}))
"""


class Counted:
    """A source that counts what is read of it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.reads: Counter[str] = Counter()

    def tensor(self, name: str) -> Tensor:
        self.reads[name] += 1
        return self.tensors[name]


def bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype == torch.float32 and torch.equal(a, b)


def opened(networks: ModuleType, name: str, folder: Path, dtype: torch.dtype) -> tuple[Model, Weights, Tensor]:
    """A golden written to a file in `dtype`: (its model, its weights there, ids)."""
    g = networks.golden(name)
    state = networks.stored(networks.theirs(networks.config(name)))
    save_file({k: v.to(dtype).contiguous() for k, v in state.items()}, folder / "model.safetensors")
    weights = open_weights(str(folder), g.model, arch.names(g.model), layout="hf", ignored=arch.ignored(g.model))
    return g.model, weights, g.ids


@pytest.mark.parametrize("name", SPREAD)
def test_bits(name: str, networks: ModuleType) -> None:
    g = networks.golden(name)
    source = networks.Held(g.tensors)
    assert bits(logits(g.model, source, g.ids), g.net(g.ids))
    assert bits(logits(g.model, source, g.ids[:, 3:4]), g.net(g.ids[:, 3:4]))  # one row takes other ways


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_oss", "deepseek_v3", "mixtral"])
def test_bits_of_a_file(name: str, networks: ModuleType, tmp_path: Path) -> None:
    """Stored in bf16, computed in fp32 and in bf16, several rows at once; fused, transposed and stacked tensors."""
    model, weights, ids = opened(networks, name, tmp_path, torch.bfloat16)
    two = torch.cat((ids, ids.flip(1)))
    for dtype in (torch.float32, torch.bfloat16):
        net = build(model, dtype=dtype)
        net.assign(weights, dtype=dtype)
        assert bits(logits(model, weights, two, dtype=dtype), net(two))


@pytest.mark.parametrize("name", ["deepseek_v3", "minimax_m2"])
def test_corrections_stay_in_fp32(name: str, networks: ModuleType) -> None:
    """A router's correction is not rounded with the weights: close experts would change places."""
    g = networks.golden(name)
    far = {n: t + 500 if n.endswith("correction_bias") else t for n, t in g.tensors.items()}  # in bf16 all the same
    rounded = {n: t.bfloat16().float() if n.endswith("correction_bias") else t for n, t in far.items()}
    net, other = (networks.network(g.model, tensors, torch.bfloat16) for tensors in (far, rounded))
    assert not bits(net(g.ids), other(g.ids))
    assert bits(logits(g.model, networks.Held(far), g.ids, dtype=torch.bfloat16), net(g.ids))


@pytest.mark.parametrize("name", ["phi3", "minicpm3", "dynamic"])
def test_length_of_the_whole_text(name: str, networks: ModuleType) -> None:
    """Rotations that depend on the text's length turn by the length that is said."""
    if name == "dynamic":
        scaled = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        model = arch.describe(networks.config("llama", rope_parameters=scaled, max_position_embeddings=16), name)
        tensors, ids = networks.drawn(model), torch.arange(12)[None]
    else:
        g = networks.golden(name)
        model, tensors, ids = g.model, g.tensors, g.ids
    net, source = networks.network(model, tensors), networks.Held(tensors)
    plain, longer = logits(model, source, ids), logits(model, source, ids, length=120)
    assert bits(plain, net(ids))
    assert bits(longer, net(ids, length=120))
    assert networks.off(plain, longer) > 1e-3


@pytest.mark.parametrize("name", ["gptj", "gemma2", "granitemoe", "llama", "unit"])
def test_head_in_blocks(name: str, networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With bias, soft cap, scale, or rows of length 1; tied or not; the last block shorter."""
    g = networks.golden("llama" if name == "unit" else name)
    model = replace(g.model, head=replace(g.model.head, unit_rows=True)) if name == "unit" else g.model
    want = networks.network(model, g.tensors)(g.ids)
    for rows in (1, 40, 96, 97):
        monkeypatch.setattr(streamed, "HEAD_ROWS", rows)
        assert networks.off(logits(model, networks.Held(g.tensors), g.ids), want) < 1e-5


def test_blocks_of_the_real_size_are_bits(networks: ModuleType) -> None:
    """A vocabulary of more than one block, of which the last is small."""
    model = arch.describe(networks.config("llama", vocab_size=2 * streamed.HEAD_ROWS + 1000), "wide")
    tensors, ids = networks.drawn(model), torch.arange(16, 17_000, 700)[None]
    assert bits(logits(model, networks.Held(tensors), ids), networks.network(model, tensors)(ids))


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_only_what_is_needed_is_read(name: str, networks: ModuleType) -> None:
    """Of a token's experts the chosen ones; each matrix once, the table of a tied model twice; no tower."""
    g = networks.golden(name)
    source = Counted(g.tensors)
    logits(g.model, source, g.ids[:, :1])
    experts: Counter[int] = Counter()
    for t in g.model.tensors():
        if t.e >= 0 and t.name.endswith("up.weight"):
            experts[t.i] += source.reads[t.name]
        if len(t.shape) > 1:
            assert source.reads[t.name] <= 1, t.name
            assert source.reads[t.name] == 1 or t.e >= 0, t.name
    chosen = {i: layer.mlp.top_k for i, layer in enumerate(g.model.layers) if isinstance(layer.mlp, MoE)}
    assert experts == chosen
    assert any(isinstance(x.mlp, MoE) and x.mlp.top_k < x.mlp.n_experts for x in g.model.layers)


def test_nothing_to_differentiate(networks: ModuleType) -> None:
    g = networks.golden("gpt2")
    source = networks.Held({n: t.clone().requires_grad_() for n, t in g.tensors.items()})
    assert not logits(g.model, source, g.ids).requires_grad


def test_callbacks(networks: ModuleType) -> None:
    g = networks.golden("gemma2")
    steps: list[tuple[int, int]] = []
    streams: list[tuple[int, Tensor]] = []
    logits(g.model, networks.Held(g.tensors), g.ids, progress=lambda *x: steps.append(x),
           hidden=lambda *x: streams.append(x))
    layers = len(g.model.layers)
    assert steps == [(n, layers + 1) for n in range(1, layers + 2)]
    assert [n for n, _ in streams] == list(range(layers + 1))
    step = g.net.step(g.ids.shape[1], 0)
    x = g.net.embedded(g.ids, step)
    assert torch.equal(streams[0][1], x)
    for block, (_, got) in zip(g.net.layers, streams[1:], strict=True):
        x = block(x, step)
        assert torch.equal(got, x)


@pytest.mark.parametrize("lost", ["layers.1.mlp.up.weight", "embed.weight", "head.weight", "norm.weight",
                                  "layers.2.attn_norm.weight"])
def test_a_tensor_of_another_shape_is_refused(lost: str, networks: ModuleType) -> None:
    g = networks.golden("llama")
    source = networks.Held({**g.tensors, lost: g.tensors[lost][:-1]})
    with pytest.raises(InputRefused, match=f"^{lost} is .*, not ") as caught:
        logits(g.model, source, g.ids)
    assert caught.value.code == "tensor-shape"


@pytest.mark.parametrize("token", [-1, 97, 1 << 40])
def test_ids_outside_the_vocabulary(token: int, networks: ModuleType) -> None:
    g = networks.golden("llama")
    with pytest.raises(InputRefused, match=rf"^token {token} is outside .*0\.\.96$") as caught:
        logits(g.model, networks.Held(g.tensors), torch.tensor([[3, token]]))
    assert caught.value.code == "token-range"
    assert caught.value.help


def test_refusals(networks: ModuleType) -> None:
    g = networks.golden("gpt2")
    source = Counted(g.tensors)
    for ids in (torch.arange(4), torch.empty(1, 0, dtype=torch.long)):
        with pytest.raises(ValueError, match="not \\(batch, tokens\\)"):
            logits(g.model, source, ids)
    with pytest.raises(InputRefused) as late:
        logits(g.model, source, torch.zeros(1, 65, dtype=torch.long))
    assert late.value.code == "too-long"
    with pytest.raises(InputRefused) as state:
        logits(arch.describe(networks.config("mamba"), "mamba"), source, torch.zeros(1, 2, dtype=torch.long))
    assert state.value.code == "not-runnable"


def hollow(folder: Path, *, vocab: int, hidden: int, ffn: int, layers: int) -> int:
    """A bf16 llama whose file is a header and a hole, so that its size costs nothing. The bytes of its tensors."""
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn,
              "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
              "max_position_embeddings": 2048, "hidden_act": "silu", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = arch.describe(config, "config.json")
    header: dict[str, Any] = {}
    at = 0
    for s in stored_tensors(model, arch.names(model)):
        size = 2 * math.prod(s.shape)
        header[s.name] = {"dtype": "BF16", "shape": list(s.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + at)
    return at


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="anonymous memory is read from /proc")
def test_memory(tmp_path: Path) -> None:
    """A model of 336 MB, embedding and head 67 MB each, takes less than one and a half of them beside the result.

    The promise is twice the largest tensor + 150 MB; it would not show a whole table in fp32, nor a lost layer. It is
    44 MB as a rule; once in many runs the allocator keeps a freed matrix, and 68 MB were seen.
    """
    total = hollow(tmp_path, vocab=32_768, hidden=1024, ffn=4096, layers=6)
    largest = 32_768 * 1024 * 2
    assert total > 4 * largest
    run = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True)
    said = json.loads(run.stdout)
    assert said["finite"]
    assert said["peak"] - said["result"] < 1.5 * largest
    assert said["peak"] < 2 * largest + 150_000_000


def pair(*, batch: int = 2, tokens: int = 7, vocab: int = 50) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    a = 3 * torch.randn(batch, tokens, vocab, generator=made)
    return a, a + 0.1 * torch.randn(a.shape, generator=made)


def test_the_same_logits_do_not_diverge() -> None:
    a, _ = pair()
    same = compare_logits(a, a.clone())
    assert astuple(same) == (14, 0.0, 0.0, 0.0, 0.0, 1.0)


def test_divergence_by_hand() -> None:
    """softmax (1/2, 1/2) and (1/4, 3/4) at the first position; the same at the second; other tops at the third."""
    a = torch.tensor([[[0.0, 0.0], [1.0, 2.0], [0.0, math.log(3)]]])
    b = torch.tensor([[[5.0, 5.0 + math.log(3)], [1.0, 2.0], [math.log(3), 0.0]]])
    got = compare_logits(a, b)
    first, third = 0.5 * math.log(4 / 3), 0.5 * math.log(3)
    assert got.tokens == 3
    assert got.max_abs_dlogit == pytest.approx(5 + math.log(3))
    assert got.max_kl == pytest.approx(third, rel=1e-6)
    assert got.mean_kl == pytest.approx((first + third) / 3, rel=1e-6)
    assert got.kl_position_0 == pytest.approx(first, rel=1e-6)
    assert got.top1_agreement == pytest.approx(1 / 3)
    assert compare_logits(b, a).mean_kl != pytest.approx(got.mean_kl, rel=1e-3)  # it is not symmetric


def test_divergence_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the blocks; position 0 of both texts of a batch; as PyTorch has it."""
    a, b = pair()
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    whole = compare_logits(a, b)
    heights: list[int] = []
    softmax = Tensor.log_softmax
    monkeypatch.setattr(Tensor, "log_softmax", lambda x, dim: heights.append(len(x)) or softmax(x, dim))
    assert whole.mean_kl == pytest.approx(float(kl.mean()), rel=1e-12)
    assert whole.max_kl == pytest.approx(float(kl.max()), rel=1e-12)
    assert whole.kl_position_0 == pytest.approx(float(kl[:, 0].mean()), rel=1e-12)
    ids = torch.arange(14).view(2, 7) * 3
    said = loss(a, ids)
    for rows in (0, 1, 3, 5):  # one at least, however wide
        monkeypatch.setattr(divergence, "BLOCK_BYTES", 8 * 50 * rows)
        heights.clear()
        assert astuple(compare_logits(a, b)) == pytest.approx(astuple(whole), rel=1e-12)
        assert loss(a, ids) == pytest.approx(said, rel=1e-12)
        assert max(heights) == max(rows, 1)
    assert compare_logits(a[0], b[0]).kl_position_0 == pytest.approx(float(kl[0, 0]), rel=1e-12)


def test_no_divergence_is_below_zero() -> None:
    """Logits that are the same but for a constant: the distributions differ by rounding alone, either way."""
    a = pair(batch=1, tokens=40)[0].double()
    kl = [compare_logits(a[:, n : n + 1], a[:, n : n + 1] + 1 / 3).mean_kl for n in range(40)]
    assert min(kl) == 0
    assert max(kl) < 1e-14


def test_large_and_rounded_logits() -> None:
    a, b = pair()
    far = compare_logits(1e30 * a, 1e30 * b)
    assert all(math.isfinite(x) for x in astuple(far))
    assert far.max_kl > 1e20
    assert compare_logits(a.bfloat16(), a).max_abs_dlogit > 0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "BLOCK_BYTES", 8 * 50 * 4)
    a, b = pair()
    b[1, 2, 49] = value
    for one, other, whose in ((a, b, "the second"), (b, a, "the first"), (b, b, "the first")):
        with pytest.raises(InputRefused, match=f"logits of {whose} for token 9 ") as caught:
            compare_logits(one, other)
        assert caught.value.code == "not-finite"
        assert caught.value.help
    with pytest.raises(InputRefused, match="token 2 "):
        loss(b, torch.zeros(2, 7, dtype=torch.long))


def test_shapes_that_do_not_compare() -> None:
    a, _ = pair()
    for one, other in ((a, a[..., :-1]), (a, a[:, :-1]), (a[0, 0], a[0, 0]), (a[:, :0], a[:, :0]), (a[0], a)):
        with pytest.raises(ValueError, match="logits are"):
            compare_logits(one, other)


def test_loss() -> None:
    a, _ = pair()
    ids = torch.arange(14).view(2, 7) * 3
    want = torch.nn.functional.cross_entropy(a[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    assert loss(a, ids) == pytest.approx(float(want), rel=1e-12)
    for logits_, said in ((a, ids[:, 1:]), (a[:, :1], ids[:, :1]), (a[0], ids[0]), (a[..., 0], ids)):
        with pytest.raises(ValueError, match="a loss takes"):
            loss(logits_, said)


@pytest.mark.parametrize("vocab", [1, 2, 3, 64, 97, 32_000, 50_257, 128_256, 262_144])
def test_probe_ids_are_spread(vocab: int, networks: ModuleType) -> None:
    model = arch.describe(networks.config("llama", vocab_size=vocab), "probe")
    ids = probe_ids(model)
    found = ids[0].tolist()
    n = min(64, vocab)
    assert ids.dtype == torch.long
    assert ids.shape == (1, n)
    assert len(set(found)) == n
    assert 0 <= min(found) <= max(found) < vocab
    assert torch.equal(ids, probe_ids(model))
    if vocab > 1000:
        ends = [0, *sorted(found), vocab]
        assert max(b - a for a, b in zip(ends, ends[1:], strict=False)) < 3 * vocab / n
        assert min(abs(a - b) for a, b in zip(found, found[1:], strict=False)) > vocab / 4
    assert len(probe_ids(model, 5)[0]) == min(5, vocab)


def test_probe_ids_end_with_the_positions(networks: ModuleType) -> None:
    """The table of positions, the context before and after stretching, and attention that is described so far only."""
    def count(name: str, **changes: Any) -> int:
        return probe_ids(arch.describe(networks.config(name, **changes), name), 90).shape[1]

    assert count("llama") == 90
    assert count("llama", max_position_embeddings=50) == 50
    assert count("gpt2") == 64
    assert count("llama-bias-tied-llama3") == 16
    assert count("bloom") == 90
    llama = arch.describe(networks.config("llama"), "llama")
    assert llama.layers[0].attn is not None
    ends = replace(llama.layers[0], attn=replace(llama.layers[0].attn, exact_to=20))
    assert probe_ids(replace(llama, layers=(ends, *llama.layers[1:]))).shape == (1, 20)
    longer = replace(networks.golden("gpt2").model, context=replace(llama.context, trained=None, usable=None))
    assert probe_ids(longer, 90).shape == (1, 64)
    assert probe_ids(replace(llama, context=replace(llama.context, trained=None, usable=30)), 90).shape == (1, 30)
