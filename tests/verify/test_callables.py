"""Somebody's own code as a side: how it is found, run and listened to, and how it fails in one line."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.verify import hooks
from llamactl.verify.callables import inside, load_callable, looks_callable, refed, run_callable
from llamactl.verify.hooks import blocks_of

V, D, L, T = 60, 16, 3, 9
IDS = (torch.arange(T) * 7 % V)[None]


class Block(nn.Module):
    """A block that writes into its own input, as hand-written ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.attn = nn.ModuleDict({"v": nn.Linear(D, D)})
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Sequential(nn.Linear(2 * D, D)))

    def forward(self, mask: Tensor | None, x: Tensor, *, scale: float = 1.0) -> Tensor:
        reach = torch.ones(x.shape[-2], x.shape[-2], dtype=x.dtype).tril()
        x += reach @ self.attn["v"](self.norm(x)) * scale / 9
        x += self.mlp(self.norm(x))
        return x


class Port(nn.Module):
    """A small network: its blocks take the stream as their second argument or by name."""

    def __init__(self, by_name: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_name = by_name
        self.embed = nn.Embedding(V, D)
        self.drop = nn.Dropout(0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(L))
        self.tail = nn.ModuleList(nn.Linear(2, 2) for _ in range(L))  # as many, and smaller
        self.out = nn.LayerNorm(D)
        self.head = nn.Linear(D, V, bias=False)
        self.register_buffer("ones", torch.ones(1).to(torch.float16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(None, x=x) if self.by_name else block(None, x, scale=1.0)
        out: Tensor = self.head(self.out(x))
        return out


def by_hand(net: Port, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The stream before each block and after the last, and the logits."""
    with torch.no_grad():
        x, stream = net.embed(ids), []
        for block in net.blocks:
            stream.append(x[0].clone())
            x = block(None, x.clone())
        stream.append(x[0].clone())
        return stream, net.head(net.out(x))[0]


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """code(text): writes a module into the current folder; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text: str, name: str = "theirs_of_a_test") -> str:
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(text))
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("theirs_of_a_test", "another_of_a_test"):
            del sys.modules[name]


# ---- what is named


@pytest.mark.parametrize(("text", "is_one"), [
    ("a:b", False), ("ab:c", True), ("pkg.model:Port.make", True), ("C:\\model", False), ("C:model", False),
    ("./x:y", False), ("org/name:x", False), ("ab:", False), (":ab", False), ("ab", False), ("ab:c:d", False),
    ("ab:1c", False), ("ab:c()", False), ("hf://a:b", False), ("ab.:c", False), ("übung:größe", True), ("", False),
])
def test_the_form_of_a_callable(text: str, is_one: bool) -> None:
    assert looks_callable(text) is is_one
    if not is_one:
        with pytest.raises(UsageError) as caught:
            load_callable(text)
        assert "package.module:name" in caught.value.message


KINDS = """
class Net(nn.Module):
    def __init__(self, n=60):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(n))
    def forward(self, ids):
        return self.weight[ids]
made = Net()
def make(): return Net()
def make_with(n=60): return Net(n)
def run(ids): return torch.eye(60)[ids]
def make_function(): return run
def run_default(ids=None): return torch.eye(60)[ids] if ids is not None else 3
class Kept:
    def __init__(self): self.net = Net()
    def __call__(self, ids): return self.net(ids)
    @staticmethod
    def port(): return Net()
kept = Kept()
by_lambda = lambda ids: torch.eye(60)[ids]
"""


@pytest.mark.parametrize("name", ["Net", "made", "make", "make_with", "run", "make_function", "run_default", "Kept",
                                  "kept", "kept.net", "Kept.port", "by_lambda"])
@pytest.mark.parametrize("module", ["theirs_of_a_test", "another_of_a_test.inside.model"])
def test_every_kind_of_callable_runs(code: Any, name: str, module: str) -> None:
    side = load_callable(f"{code(KINDS, module)}:{name}")
    assert isinstance(side, nn.Module) is (name in ("Net", "made", "make", "make_with", "kept.net", "Kept.port"))
    assert torch.equal(run_callable(side, IDS).logits, torch.eye(V)[IDS[0]])


def test_the_current_folder_comes_first(code: Any) -> None:
    load_callable(f"{code('def run(ids): return ids')}:run")
    assert sys.path[0] == str(Path.cwd())
    load_callable("theirs_of_a_test:run")
    assert sys.path.count(str(Path.cwd())) == 1


@pytest.mark.parametrize(("text", "name", "kind", "code_", "part"), [
    (None, "nothing_of_this_name:f", NotAvailable, "callable-not-found", "no module 'nothing_of_this_name'"),
    (None, "torch.nothing_here:f", NotAvailable, "callable-not-found", "no module 'torch.nothing_here'"),
    ("import nothing_of_this_name", "run", NotAvailable, "callable-not-found", "needs 'nothing_of_this_name'"),
    ("def running(ids): ...", "runing", NotAvailable, "callable-not-found", "no 'runing'"),
    ("x = 3", "x", InputRefused, "candidate-failed", "x is an int"),
    ("1 / 0", "run", InputRefused, "candidate-failed", "ZeroDivisionError: division by zero"),
    ("raise SystemExit(3)", "run", InputRefused, "candidate-failed", "SystemExit: 3"),
    ("def f(:", "run", InputRefused, "candidate-failed", "SyntaxError"),
    ("def run(): raise ValueError('a\\nb\\tc')", "run", InputRefused, "candidate-failed", "ValueError: a b c"),
    ("class Net(nn.Module):\n  def __init__(self, n): ...", "Net", InputRefused, "candidate-failed", "'n'"),
])
def test_what_cannot_be_loaded_is_one_line(code: Any, text: str | None, name: str, kind: Any, code_: str, part: str
                                           ) -> None:
    ref = name if text is None else f"{code(text)}:{name}"
    with pytest.raises(kind) as caught:
        load_callable(ref)
    assert (caught.value.code, caught.value.path) == (code_, ref)
    assert part in caught.value.message
    assert "\n" not in caught.value.message
    if name == "runing":
        assert caught.value.help == "did you mean 'running'?"


def test_a_stop_from_outside_is_no_failure_of_the_code(code: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_callable(f"{code('raise KeyboardInterrupt')}:run")

    def run(ids: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_callable(run, IDS)


def test_what_the_code_prints_is_no_answer(code: Any, capsys: pytest.CaptureFixture[str]) -> None:
    name = code("print('loading')\ndef run(ids):\n print('running')\n return torch.eye(60)[ids]")
    side = load_callable(f"{name}:run")
    run_callable(side, IDS)
    assert capsys.readouterr() == ("", "loading\nrunning\n")


# ---- what it gives back


class Out:
    def __init__(self, logits: Any) -> None:
        self.logits = logits


@pytest.mark.parametrize("form", [
    lambda x: x, lambda x: x[0], lambda x: (x, None), lambda x: [x], lambda x: Out(x), lambda x: {"logits": x},
    lambda x: x.numpy(), lambda x: x[0].numpy(), lambda x: (x[0], [1, 2]),
], ids=["batch", "rows", "tuple", "list", "object", "dict", "array", "array rows", "rows in a tuple"])
def test_every_form_of_logits(form: Callable[[Tensor], Any]) -> None:
    x = torch.randn(1, T, V)
    found = run_callable(lambda ids: form(x), IDS)
    assert torch.equal(found.logits, x[0])
    assert (found.blocks, found.notes, found.computed_in) == (None, (), "fp32")


@pytest.mark.parametrize(("out", "part"), [
    (None, "a NoneType"), ("text", "a str"), ({}, "a dict"), (torch.zeros(1, T, V).long(), "torch.int64"),
    (torch.zeros(1, 1, V), "[1, 1, 60] for 9 tokens"), (torch.zeros(2, T, V), "[2, 9, 60]"),
    (torch.zeros(T + 1, V), "[10, 60]"), (torch.zeros(T), "[9]"), (torch.zeros(1, T, 0), "[1, 9, 0]"), ((), "a tuple"),
])
def test_what_is_no_logits_is_refused(out: Any, part: str) -> None:
    with pytest.raises(InputRefused) as caught:
        run_callable(lambda ids: out, IDS, label="mine:run")
    assert (caught.value.code, caught.value.path) == ("candidate-shape", "mine:run")
    assert part in caught.value.message


def test_logits_in_halves_are_known_by_their_values() -> None:
    x = torch.randn(1, T, V)
    for kind, word in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for out in (x.to(kind), x.to(kind).float()):
            found = run_callable(lambda ids, out=out: out, IDS)
            assert found.computed_in == word
            assert found.logits.dtype == torch.float32
            assert torch.equal(found.logits, x.to(kind).float()[0])
    assert run_callable(lambda ids: x.double() / 3, IDS).logits.dtype == torch.float64
    assert run_callable(lambda ids: x.log_softmax(-1), IDS).log_probs


def test_a_failure_inside_is_one_line_and_keeps_its_cause() -> None:
    def run(ids: Tensor) -> Tensor:
        raise RuntimeError("size mismatch,\n got 3")

    with pytest.raises(InputRefused) as caught:
        run_callable(run, IDS, label="mine:run")
    assert caught.value.line() == "error[candidate-failed]: mine:run: it failed with RuntimeError: size mismatch, got 3"
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_the_ids_are_not_the_codes_to_write() -> None:
    before = IDS.clone()

    def run(ids: Tensor) -> Tensor:
        assert ids.dtype == torch.int64
        assert ids.shape == (1, T)
        return torch.eye(V)[ids.zero_()]

    run_callable(run, IDS)
    assert torch.equal(IDS, before)


# ---- a module


@pytest.mark.parametrize("by_name", [False, True])
def test_the_stream_of_a_module(by_name: bool) -> None:
    """Block by block as computed by hand, though each block writes into its input, and dropout is off."""
    net = Port(by_name)
    stream, logits = by_hand(net.eval(), IDS)
    found = run_callable(net.train(), IDS, layers=L)
    assert torch.equal(found.logits, logits)
    c = found.blocks
    assert c is not None
    assert c.names == ("blocks.0", "blocks.1", "blocks.2")
    assert torch.equal(c.embedded, stream[0])
    assert all(torch.equal(a, b) for a, b in zip(c.inputs, stream[:-1], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(c.outputs, stream[1:], strict=True))
    assert c.head_input is not None
    assert torch.equal(c.head_input, net.out(stream[-1]))
    assert found.notes == ()


def test_the_inside_of_each_block() -> None:
    net = Port()
    c = run_callable(net, IDS, layers=L).blocks
    assert c is not None
    for n, parts in enumerate(c.parts):
        block: Any = net.blocks[n]
        assert list(parts) == ["norm", "attn.v", "mlp.0", "mlp.1", "mlp.2", "mlp"]  # no deeper
        assert torch.equal(parts["norm"][0], c.inputs[n])
        assert torch.equal(parts["norm"][1], block.norm(c.inputs[n]))
        assert torch.equal(parts["attn.v"][0], parts["norm"][1])
        assert torch.equal(parts["attn.v"][1], block.attn["v"](parts["norm"][1]))
        assert torch.equal(parts["mlp.2"][1], parts["mlp"][1])
        assert torch.allclose(parts["mlp"][1], c.outputs[n] - before_mlp(parts, c.inputs[n]), atol=1e-5)


def before_mlp(parts: hooks.Parts, x: Tensor) -> Tensor:
    return x + torch.ones(T, T).tril() @ parts["attn.v"][1] / 9


def test_what_several_parts_read_is_kept_once() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.q, self.k, self.v = nn.LayerNorm(D), *(nn.Linear(D, D) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            out: Tensor = self.q(y) + self.k(y)
            y += 1  # what v reads is another value in the same place
            return out + self.v(y)

    net = nn.Sequential(nn.Embedding(V, D), Three(), Three(), nn.Linear(D, V))
    c = run_callable(net, IDS, layers=2).blocks
    assert c is not None
    parts = c.parts[0]
    assert parts["q"][0] is parts["k"][0] is parts["norm"][1]
    assert torch.equal(parts["v"][0], parts["q"][0] + 1)


def test_only_the_blocks_that_are_asked_for_are_kept_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    c = run_callable(Port(), IDS, layers=L, parts=(1,)).blocks
    assert c is not None
    assert [len(p) for p in c.parts] == [0, 6, 0]
    monkeypatch.setattr(hooks, "PARTS_BYTES", 4000)
    found = run_callable(Port(), IDS, layers=L)
    assert found.blocks is not None
    assert [len(p) for p in found.blocks.parts] == [0, 0, 0]
    assert len(found.blocks.outputs) == L
    assert [code for code, _ in found.notes] == ["module-parts"]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_a_module_in_halves_computes_in_fp32_and_is_left_as_it_was(kind: torch.dtype) -> None:
    net = Port().to(kind).train()
    net.blocks[1].eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    at = {k: v.data_ptr() for k, v in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    found = run_callable(net, IDS, layers=L)
    wide = Port().to(kind).float()
    assert torch.equal(found.logits, by_hand(wide.eval(), IDS)[1])
    assert found.parameters == ({torch.bfloat16: "bf16", torch.float16: "fp16"}[kind],)
    assert [code for code, _ in found.notes] == ["module-upcast"]
    assert found.parameters[0] in found.notes[0][1]
    assert found.blocks is not None
    assert found.blocks.outputs[0].dtype == torch.float32
    assert all(torch.equal(v, before[k]) and v.dtype == before[k].dtype and v.data_ptr() == at[k]
               for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_module_in_fp64_stays_there() -> None:
    net = Port().double()
    found = run_callable(net, IDS, layers=L)
    assert (found.logits.dtype, found.parameters, found.notes) == (torch.float64, ("fp64",), ())
    assert found.blocks is not None
    assert found.blocks.outputs[0].dtype == torch.float64


def test_a_module_that_fails_is_left_as_it_was() -> None:
    net = Port().bfloat16().train()
    net.head = nn.Linear(D + 1, V)
    with pytest.raises(InputRefused, match="RuntimeError"):
        run_callable(net, IDS, layers=L)
    assert net.training
    assert net.embed.weight.dtype == torch.bfloat16
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_logits_of_the_last_token_alone_are_asked_for_again() -> None:
    class Trainer(Port):
        def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
            x = super().forward(ids)
            return (x, torch.tensor(0.0)) if targets is not None else (x[:, [-1]], None)

    found = run_callable(Trainer(), IDS, layers=L)
    assert torch.equal(found.logits, by_hand(Port().eval(), IDS)[1])
    assert found.blocks is not None
    assert len(found.blocks.inputs) == L


# ---- which list is the blocks


class Named(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def linears(n: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(n)]


@pytest.mark.parametrize(("net", "layers", "names"), [
    (Named(h=nn.ModuleList(linears(3)), x=nn.ModuleList(linears(3, 2))), 3, ["h.0", "h.1", "h.2"]),
    (Named(h=nn.ModuleList(linears(3)), x=nn.ModuleList(linears(2, 9))), 3, ["h.0", "h.1", "h.2"]),
    (Named(h=nn.ModuleList(linears(3)), x=nn.ModuleList(linears(2, 2))), 4, ["h.0", "h.1", "h.2"]),
    (Named(h=nn.ModuleList(linears(1))), 1, ["h.0"]), (Named(h=nn.ModuleList(linears(1))), None, []),
    (Named(h=nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})), 2, ["h.0", "h.1"]),
    (Named(t=nn.ModuleDict({"wte": nn.Embedding(9, 9), "h": nn.ModuleList(linears(2))})), 2, ["t.h.0", "t.h.1"]),
    (nn.Sequential(nn.Embedding(90, 90), *linears(3), nn.LayerNorm(4)), 3, ["1", "2", "3"]),
    (nn.Sequential(nn.Embedding(90, 90), *linears(3), nn.LayerNorm(4)), None, ["1", "2", "3"]),
    (Named(h=nn.ModuleList(nn.ModuleList(linears(8)) for _ in range(2))), 2, ["h.0", "h.1"]),
    (Named(a=nn.Linear(2, 2)), 2, []), (Named(h=nn.ModuleList([nn.GELU(), nn.GELU()])), 2, []),
])
def test_which_list_is_the_blocks(net: nn.Module, layers: int | None, names: list[str]) -> None:
    assert [n for n, _ in blocks_of(net, layers)] == names


def test_a_module_without_blocks_runs_all_the_same() -> None:
    net = nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V))
    found = run_callable(net, IDS, layers=5)
    assert found.blocks is None
    assert [code for code, _ in found.notes] == ["module-blocks"]


def test_blocks_are_told_in_the_order_in_which_they_run() -> None:
    class Odd(Port):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for n in (2, 0, 0):
                x = self.blocks[n](None, x)
            out: Tensor = self.head(self.out(x))
            return out

    c = run_callable(Odd(), IDS, layers=L).blocks
    assert c is not None
    assert c.names == ("blocks.2", "blocks.0", "blocks.0")
    assert torch.equal(c.inputs[1], c.outputs[0])

    class Short(Port):
        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.out(self.blocks[0](None, self.embed(ids))))
            return out

    found = run_callable(Short(), IDS, layers=L)
    assert found.blocks is not None
    assert found.blocks.names == ("blocks.0",)
    assert ("module-blocks", "1 blocks ran, the model has 3 layers") in found.notes


# ---- fed with another stream


@pytest.mark.parametrize("by_name", [False, True])
def test_every_block_is_fed_with_what_is_given(by_name: bool) -> None:
    """A fault of block 0 does not reach block 1, and one of block 2 is seen on its own."""
    right, wrong = Port(by_name).eval(), Port(by_name)
    stream, _ = by_hand(right, IDS)
    with torch.no_grad():
        wrong.blocks[0].norm.weight += 0.5
        wrong.blocks[2].attn["v"].bias += 1.0
    outputs = refed(wrong, IDS, stream[:-1], layers=L)
    far = [float((a - b).abs().max()) for a, b in zip(outputs, stream[1:], strict=True)]
    assert far[1] == 0
    assert far[0] > 1e-2
    assert far[2] > 1e-2
    plain = run_callable(wrong, IDS, layers=L).blocks
    assert plain is not None
    assert float((plain.outputs[1] - stream[2]).abs().max()) > 1e-2


def test_the_inside_of_a_block_that_is_fed() -> None:
    right, wrong = Port().eval(), Port()
    stream, _ = by_hand(right, IDS)
    with torch.no_grad():
        wrong.blocks[2].attn["v"].bias += 1.0
        wrong.blocks[0].norm.weight += 0.5
    parts = inside(wrong, IDS, stream[:-1], 2, layers=L)
    want = inside(right, IDS, stream[:-1], 2, layers=L)
    same = {name: torch.equal(parts[name][1], want[name][1]) for name in parts}
    assert same["norm"]
    assert not same["attn.v"]
    assert torch.equal(parts["norm"][0], stream[2])


def test_what_is_given_is_not_written_to() -> None:
    stream, _ = by_hand(Port().eval(), IDS)
    before = [x.clone() for x in stream]
    refed(Port(), IDS, stream[:-1], layers=L)
    assert all(torch.equal(a, b) for a, b in zip(stream, before, strict=True))


def test_a_module_without_blocks_cannot_be_fed() -> None:
    with pytest.raises(InputRefused, match="no blocks"):
        refed(nn.Sequential(nn.Embedding(V, D), nn.Linear(D, V)), IDS, [torch.zeros(T, D)])


# ---- transformers' own


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_transformers(networks: Any, name: str, dtype: torch.dtype) -> None:
    """The stream that its hooks give is the one it tells itself, and the logits are the goldens' network's."""
    hf = networks.theirs(networks.config(name)).to(dtype)
    ids = networks.golden(name).ids
    with torch.no_grad():
        want = hf.to(torch.float32)(ids, output_hidden_states=True)
    found = run_callable(hf.to(dtype), ids, layers=hf.config.num_hidden_layers)
    if dtype == torch.bfloat16:
        with torch.no_grad():
            want = hf.to(dtype).float()(ids, output_hidden_states=True)
    assert torch.allclose(found.logits, want.logits[0], atol=1e-5)
    c = found.blocks
    assert c is not None
    assert len(c.outputs) == hf.config.num_hidden_layers
    for n, x in enumerate(want.hidden_states[:-1]):  # the last is normed
        assert torch.allclose(c.inputs[n], x[0], atol=1e-5), n
    assert c.head_input is not None
    assert torch.allclose(c.head_input, want.hidden_states[-1][0], atol=1e-5)
    assert any(path.count(".") == 1 for path in c.parts[0])
    again = refed(hf, ids, c.inputs, layers=hf.config.num_hidden_layers)
    assert all(torch.equal(a, b) for a, b in zip(again, c.outputs, strict=True))
