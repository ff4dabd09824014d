"""One token's step in the forms that are recorded (graph.py) or compiled (aot.py): the same logits, the same cache."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl.errors import NotAvailable
from llamactl.net import aot
from llamactl.net.cache import Cache
from llamactl.net.graph import Recorded, bucket, can_record, static_logits

PROMPT = 10
RECORDED = ["llama", "gpt2", "gemma2", "gemma3_text", "gpt_neox", "mistral", "bloom", "falcon-rw", "ministral3",
            "deepseek_v3", "phi3", "opt", "olmo2", "cohere2", "hunyuan_v1_dense", "gpt_oss", "llama4_text"]
APART = [n for n in RECORDED if n not in ("deepseek_v3", "gpt_oss", "llama4_text")]


def caches(golden: Any, n: int) -> list[Cache]:
    """n caches that hold the first tokens."""
    out = []
    for _ in range(n):
        cache = Cache(golden.model, 1, golden.ids.shape[1], dtype=torch.float32)
        golden.net(golden.ids[:, :PROMPT], cache)
        out.append(cache)
    return out


def differ(a: Cache, b: Cache) -> float:
    pairs = [(x, y) for x, y in zip(a.layers, b.layers, strict=True) if x is not None and y is not None]
    return max(float((getattr(x, t) - getattr(y, t)).abs().max()) for x, y in pairs for t in "kv" if x.k.numel()
               and getattr(x, t).numel())


@pytest.mark.parametrize("name", RECORDED)
@torch.inference_mode()
def test_a_step_whose_place_is_a_tensor(name: str, networks: ModuleType) -> None:
    golden = networks.golden(name)
    usual, static = caches(golden, 2)
    total = golden.ids.shape[1]
    for i in range(PROMPT, total):
        token = golden.ids[:, i : i + 1]
        want = golden.net(token, usual)
        got = static_logits(golden.net, token, static, torch.tensor([i]), total)
        assert float((got - want).abs().max()) < 1e-5
    assert differ(usual, static) < 1e-5


@pytest.mark.parametrize("name", APART)
@torch.inference_mode()
def test_a_step_beside_its_cache(name: str, networks: ModuleType) -> None:
    """What is compiled, run as it is written: the new k and v come back, and the past is only read."""
    golden = networks.golden(name)
    assert aot.can_compile(golden.net)
    usual, apart = caches(golden, 2)
    run = aot.Compiled(golden.net, Written(golden.net))
    for i in range(PROMPT, golden.ids.shape[1]):
        token = golden.ids[:, i : i + 1]
        assert float((run(token, apart) - golden.net(token, usual)).abs().max()) < 1e-5
    assert run.package.calls == golden.ids.shape[1] - PROMPT
    assert differ(usual, apart) < 1e-5


class Written:
    """A package that runs OneToken as Python."""

    def __init__(self, network: Any) -> None:
        self.step, self.ropes, self.calls = aot.OneToken(network), 2 * len(network.ropes), 0

    def run(self, flat: list[Tensor]) -> list[Tensor]:
        self.calls += 1
        ids, place, rest = flat[0], flat[1], flat[2:]
        out: list[Tensor] = self.step(ids, place, rest[: self.ropes], rest[self.ropes :])
        return out


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3"])
def test_what_has_no_compiled_form(name: str, networks: ModuleType) -> None:
    assert not aot.can_compile(networks.golden(name).net)


def test_a_mixture_is_not_recorded(networks: ModuleType) -> None:
    """Its choice of experts is read back to the host."""
    assert not can_record(networks.golden("mixtral").net)
    assert can_record(networks.golden("llama").net)


@torch.inference_mode()
def test_the_first_tokens_go_the_usual_way(networks: ModuleType) -> None:
    """A compiled size is never 0 or 1: before two tokens are seen, and just after a chunk began."""
    golden = networks.golden("llama")
    run = aot.Compiled(golden.net, Written(golden.net))
    cache = Cache(golden.model, 1, 8, dtype=torch.float32)
    for i in range(5):
        run(golden.ids[:, i : i + 1], cache)
    assert (run.package.calls, cache.filled) == (3, 5)
    parts = [x.attn for x in networks.golden("llama4_text").model.layers]
    chunked = next(p for p in parts if p.window_kind == "chunked" and p.window)
    assert [aot.first_past(chunked, n * chunked.window) for n in (1, 2)] == [chunked.window, 2 * chunked.window]


def test_what_is_compiled_holds_no_file(networks: ModuleType) -> None:
    """Weights are views of a mapped file, which a package would otherwise hold once for each of them."""
    golden = networks.golden("llama")
    file = torch.cat([t.flatten() for t in golden.tensors.values()])
    views, at = {}, 0
    for name, t in golden.tensors.items():
        views[name] = file[at : at + t.numel()].view(t.shape)
        at += t.numel()
    net = networks.network(golden.model, views)
    before = dict(net.named_parameters())
    assert {p.untyped_storage().nbytes() for p in before.values()} == {file.nbytes}
    with aot.alone(net):
        inside = dict(net.named_parameters())
        assert all(p.untyped_storage().nbytes() == p.nbytes for p in inside.values())
        assert all(torch.equal(inside[n], p) for n, p in before.items())
    assert all(p is before[n] for n, p in net.named_parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "phi3"])
def test_joined_matrices(name: str, networks: ModuleType) -> None:
    """q, k, v as one product and gate, up as one, while it is compiled and no longer."""
    golden = networks.golden(name)
    parts = [m for m in golden.net.modules() if hasattr(m, "joint")]
    with torch.inference_mode(), aot._joined(golden.net):
        assert any(m.joint is not None for m in parts)
        assert float((golden.net(golden.ids)[0] - golden.want).abs().max()) < networks.CLOSE
    assert all(m.joint is None for m in parts)


@pytest.mark.parametrize(("keys", "most", "size"), [(1, 4096, 512), (512, 4096, 512), (513, 4096, 1024),
                                                    (4000, 4096, 4096), (3000, 3500, 3500), (5, 100, 100)])
def test_bucket(keys: int, most: int, size: int) -> None:
    assert bucket(keys, most) == size


class TestName:
    """The package's name is a digest of all that it depends on."""

    def test_weights_and_threads(self, networks: ModuleType) -> None:
        net = networks.golden("llama").net
        assert aot.name(net, ["a"]) == aot.name(net, ["a"]) != aot.name(net, ["b"])
        threads = torch.get_num_threads()
        before = aot.name(net, ["a"])
        torch.set_num_threads(threads + 1)
        try:
            assert aot.name(net, ["a"]) != before
        finally:
            torch.set_num_threads(threads)

    def test_another_cpu(self, networks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        """The code is made for what this one can do."""
        net = networks.golden("llama").net
        before = aot.name(net, ["a"])
        monkeypatch.setattr(aot, "cpu", lambda: "another")
        assert aot.name(net, ["a"]) != before

    def test_an_edited_model(self, networks: ModuleType) -> None:
        golden = networks.golden("llama")
        from llamactl.spec.edits import apply

        other = networks.network(apply(golden.model, "rope_theta=77"), golden.tensors)
        assert aot.name(golden.net, ["a"]) != aot.name(other, ["a"])

    def test_files(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.write_bytes(b"1234")
        before = list(aot.identity(str(tmp_path)))
        assert before == list(aot.identity(str(tmp_path)))
        os.utime(file, ns=(1, 1))
        assert list(aot.identity(str(tmp_path))) != before
        assert len(list(aot.identity(str(file)))) == 1


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="rights are POSIX's")
class TestFolder:
    """Compiled code is loaded only from where nobody else can write."""

    def test_made_for_the_user_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLAMACTL_CACHE", str(tmp_path / "new"))
        assert stat.S_IMODE(os.stat(aot.folder()).st_mode) == 0o700
        assert aot.folder() == str(tmp_path / "new" / "compiled")

    def test_a_folder_that_others_write(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLAMACTL_CACHE", str(tmp_path))
        os.chmod(aot.folder(), 0o777)
        with pytest.raises(NotAvailable) as e:
            aot.folder()
        assert e.value.code == "cache-owner"

    def test_what_a_killed_run_left_is_cleared(self, tmp_path: Path) -> None:
        for name, age in (("tmpold", 7200), ("tmpnew", 10), ("kept", 7200)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x").write_bytes(b"x")
            os.utime(tmp_path / name, (time.time() - age,) * 2)
        aot.clear(str(tmp_path))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["kept", "tmpnew"]

    def test_a_broken_package(self, networks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LLAMACTL_CACHE", str(tmp_path))
        golden = networks.golden("llama")
        file = Path(aot.folder()) / f"{aot.name(golden.net, ['w'])}.pt2"
        file.write_bytes(b"PK no package")
        with pytest.raises(NotAvailable) as e:
            aot.compiled(golden.net, Cache(golden.model, 1, 8, dtype=torch.float32), ["w"])
        assert e.value.code == "cache-broken"

    def test_somebody_elses_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = tmp_path / "x.pt2"
        file.write_bytes(b"")
        aot.own(str(file))
        monkeypatch.setattr(os, "getuid", lambda: os.stat(file).st_uid + 1)
        with pytest.raises(NotAvailable):
            aot.own(str(file))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_compiled(name: str, networks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, kept, and loaded again by a process that would compile nothing."""
    monkeypatch.setenv("LLAMACTL_CACHE", str(tmp_path))
    golden = networks.golden(name)
    said: list[str] = []
    with torch.inference_mode():
        usual, first, second = caches(golden, 3)
        made = aot.compiled(golden.net, first, ["w"], say=said.append)
        assert len(said) == 1
        monkeypatch.setattr(aot, "_make", None)
        again = aot.compiled(golden.net, second, ["w"], say=said.append)
        assert len(said) == 1
        for i in range(PROMPT, golden.ids.shape[1]):
            token = golden.ids[:, i : i + 1]
            want = golden.net(token, usual)
            assert float((made(token, first) - want).abs().max()) < 1e-4
            assert float((again(token, second) - want).abs().max()) < 1e-4
    assert differ(usual, second) < 1e-4
    (file,) = (tmp_path / "compiled").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECORDED)
def test_recorded(name: str, networks: ModuleType) -> None:
    """The CUDA graph replays what the decoder computes, over more than one size of keys."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    golden = networks.golden(name)
    if not can_record(golden.net):
        pytest.skip("a mixture is not recorded")
    net = networks.network(golden.model, {k: v.cuda() for k, v in golden.tensors.items()})
    with torch.inference_mode():
        ids, total = golden.ids.cuda(), golden.ids.shape[1]
        usual, cache = (Cache(golden.model, 1, total, dtype=torch.float32, device="cuda") for _ in range(2))
        run = Recorded(net)
        for c, call in ((usual, net), (cache, run)):
            call(ids[:, :PROMPT], c, last=True)
        for i in range(PROMPT, total):
            want = net(ids[:, i : i + 1], usual, last=True)
            assert float((run(ids[:, i : i + 1], cache, last=True) - want).abs().max()) < 1e-4
