"""The plan of each output: sources, operations, what is copied as it lies, and what no two tensors may share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.checkpoint.emit import Emitter
from llamactl.checkpoint.files import Part
from llamactl.checkpoint.held import Held
from llamactl.checkpoint.plan import Output, Planner, Side, Slice, canonical, retyped, whole
from llamactl.errors import InputRefused
from llamactl.net import values
from llamactl.net.values import Values
from llamactl.spec.model import Model
from llamactl.spec.naming import Offset, Rule, Transposed, read, stored_tensors
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WORDS = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class Memory:
    """Tensors as if they lay in files. split: (name, axis) of one that two files share."""

    warnings: tuple[tuple[str, str], ...] = ()

    def __init__(self, state: Mapping[str, Tensor], split: tuple[str, int] | None = None) -> None:
        self.state, self.split = dict(state), split
        self.tensors = {n: Held(name=n, dtype=WORDS[t.dtype], shape=tuple(t.shape), nbytes=t.nbytes)
                        for n, t in state.items()}
        self._keys = {n: t.contiguous() for n, t in state.items()}
        if split:
            self._keys |= {f"{split[0]}/{n}": t.contiguous() for n, t in enumerate(state[split[0]].chunk(2, split[1]))}

    def parts(self, name: str) -> tuple[Part, ...] | None:
        if self.split is None or name != self.split[0]:
            return None
        a, b = self._keys[f"{name}/0"].shape, self._keys[f"{name}/1"].shape
        second = (a[0], 0) if self.split[1] == 0 else (0, a[1])
        return Part(f"{name}/0", 0, 0, *a), Part(f"{name}/1", *second, *b)

    def span(self, key: str) -> None:
        return None

    def copy(self, key: str, out_fd: int, seen: Any) -> None:
        raise AssertionError("nothing lies in a file")

    @contextmanager
    def view(self, key: str) -> Iterator[memoryview]:
        data: Any = self._keys[key].view(torch.uint8).numpy()
        yield memoryview(data).cast("B")


def model_of(golden: str, **changes: Any) -> Model:
    config = {**json.loads((GOLDEN / golden / "config.json").read_text()), **changes}
    return arch.describe({k: v for k, v in config.items() if v is not None}, golden)


def drawn(model: Model, rules: Sequence[Rule], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {s.name: torch.randn(s.shape, generator=g).to(dtype) for s in stored_tensors(model, rules)}


def side(model: Model, layout: str, rules: Sequence[Rule]) -> Side:
    return Side(model, layout, tuple(rules), {t.name: (s, s.name) for s in stored_tensors(model, rules) for t in s.of})


def planner(files: Memory, source: Side, target: Side) -> Planner:
    return Planner(files, source, target, lambda stored, kinds: kinds[0] if kinds else "F32")


def made(files: Memory, o: Output) -> Tensor:
    """An output's bytes as a tensor."""
    blocks = list(map(bytes, Emitter(files, Values(files), digest=False).blocks(o)))
    kind = next(kind for kind, word in WORDS.items() if word == o.dtype)
    data = b"".join(blocks)
    assert len(data) == o.nbytes
    return torch.frombuffer(bytearray(data), dtype=kind).view(o.shape)


def mixed() -> Model:
    """Two layers whose q, k, v and o have the same shapes, of other heads: 6 and 2 of 12, then 3 and 1 of 24."""
    model = model_of("llama", num_hidden_layers=2)
    first = model.layers[0]
    assert isinstance(first.attn, Attention)
    assert isinstance(first.attn.rope, Rope)
    attn = replace(first.attn, n_heads=3, n_kv_heads=1, head_dim=24, rope=replace(first.attn.rope, dim=24))
    return replace(model, layers=(first, replace(first, attn=attn)))


@pytest.mark.parametrize(("one", "other"), [("hf", "meta"), ("meta", "hf"), ("lesson", "hf")])
def test_layers_of_one_shape_and_other_heads(one: str, other: str) -> None:
    """The rows of each layer are put in order by its own heads."""
    model = mixed()
    held, wanted = arch.names(model, one), arch.names(model, other)
    state = drawn(model, held)
    files = Memory(state)
    p = planner(files, side(model, one, held), side(model, other, wanted))
    truth = {k: v for s in stored_tensors(model, held) for k, v in read(s, state[s.name], model).items()}
    got = {k: v for s, o in zip(stored_tensors(model, wanted), p.outputs(), strict=True)
           for k, v in read(s, made(files, o), model).items()}
    assert got.keys() == truth.keys()
    assert [k for k in truth if not torch.equal(got[k], truth[k])] == []
    assert p.taken == set(state)


def test_what_is_done_is_said() -> None:
    model = model_of("llama", num_hidden_layers=1)
    hf, meta = arch.names(model), arch.names(model, "meta")
    p = planner(Memory(drawn(model, hf)), side(model, "hf", hf), side(model, "meta", meta))
    out = {o.name: o for o in p.outputs()}
    assert {o.how for n, o in out.items() if not n.endswith((".wq.weight", ".wk.weight"))} == {"copy"}
    q = out["layers.0.attention.wq.weight"]
    assert (q.how, q.ops, [s.name for s in q.sources]) == (
        "rows", ("rows put in RoPE's other order",), ["model.layers.0.self_attn.q_proj.weight"])
    gpt2 = model_of("gpt2", n_layer=1)
    hf, lesson = arch.names(gpt2), arch.names(gpt2, "lesson")
    there = planner(Memory(drawn(gpt2, hf)), side(gpt2, "hf", hf), side(gpt2, "lesson", lesson))
    found = {o.name: (o.how, o.ops) for o in there.outputs()}
    assert found["blocks.0.attn.wk.weight"] == ("values", ("transposed", "part of transformer.h.0.attn.c_attn.weight"))
    assert found["blocks.0.attn.wk.bias"] == ("rows", ("part of transformer.h.0.attn.c_attn.bias",))
    back = planner(Memory(drawn(gpt2, lesson)), side(gpt2, "lesson", lesson), side(gpt2, "hf", hf))
    found = {o.name: (o.how, o.ops) for o in back.outputs()}
    assert found["transformer.h.0.attn.c_attn.weight"] == ("values", ("transposed", "3 pieces joined"))
    assert found["transformer.h.0.attn.c_attn.bias"] == ("rows", ("3 pieces joined",))
    assert found["transformer.wte.weight"] == ("copy", ())


@pytest.mark.parametrize("axis", [0, 1])
def test_a_source_that_two_files_share(axis: int) -> None:
    """Its parts are the sources, and parts that are not needed are not asked for."""
    model = model_of("gpt2", n_layer=1)
    hf, lesson = arch.names(model), arch.names(model, "lesson")
    state, name = drawn(model, hf), "transformer.h.0.attn.c_attn.weight"  # (48, 3 * 48), stored (in, out)
    files = Memory(state, split=(name, axis))
    p = planner(files, side(model, "hf", hf), side(model, "lesson", lesson))
    out = {o.name: o for o in p.outputs()}
    for n, x in enumerate("qkv"):
        o = out[f"blocks.0.attn.w{x}.weight"]
        assert torch.equal(made(files, o), state[name][:, 48 * n : 48 * (n + 1)].t())
        assert [s.key[-1] for s in o.sources] == (["0", "1"] if axis == 0 or x == "k" else ["0" if x == "q" else "1"])
    assert torch.equal(made(files, whole(files, name)), state[name])


@pytest.mark.parametrize(("part", "rows", "cols"), [
    (Slice(36, 0, 36, 48, (36, 48)), slice(36, 72), slice(0, 48)), (Slice(0, 16, 72, 16, (72, 16)), slice(0, 72),
                                                                   slice(16, 32))])
def test_a_part_of_an_output(part: Slice, rows: slice, cols: slice) -> None:
    model = model_of("llama", num_hidden_layers=1)
    hf, meta = arch.names(model), arch.names(model, "meta")
    files = Memory(drawn(model, hf))
    p = planner(files, side(model, "hf", hf), side(model, "meta", meta))
    s = next(s for s in stored_tensors(model, meta) if s.name.endswith("wq.weight"))
    assert torch.equal(made(files, p.output(s, part)), made(files, p.output(s))[rows, cols])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_and_shifted_at_once(dtype: torch.dtype) -> None:
    """No layout does both to one tensor; a table that did would be computed all the same."""
    model = model_of("llama", num_hidden_layers=1)
    plain = canonical(model)
    ops = (Offset(by=0.5), Transposed())
    rules = tuple(r._replace(ops=ops) if r.stored.endswith(".q.weight") else r for r in plain)
    state = drawn(model, plain, dtype)
    files = Memory(state)
    p = planner(files, side(model, "canonical", plain), side(model, "x", rules))
    o = next(o for o in p.outputs() if o.name == "layers.0.attn.q.weight")
    assert (o.how, o.ops) == ("values", ("transposed", "+0.5"))
    assert torch.equal(made(files, o), (state[o.name].float() + 0.5).to(dtype).t())


@pytest.mark.parametrize("block", [1, 1000, 5000])
def test_blocks_of_every_size_are_the_same_values(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row at a time, a few, and more; turned, joined and cut."""
    model = model_of("gpt2", n_layer=1)
    hf, lesson = arch.names(model), arch.names(model, "lesson")
    for one, other, held, wanted in (("hf", "lesson", hf, lesson), ("lesson", "hf", lesson, hf)):
        files = Memory(drawn(model, held))
        found = planner(files, side(model, one, held), side(model, other, wanted)).outputs()
        whole_at_once = [made(files, o) for o in found]
        with monkeypatch.context() as m:
            m.setattr(values, "BLOCK", block)
            assert all(torch.equal(made(files, o), t) for o, t in zip(found, whole_at_once, strict=True))
            some = next(o for o in found if o.how == "values" and len(o.shape) == 2)
            assert len(list(Values(files).blocks(some))) > 1


def test_another_type_counts_its_bytes() -> None:
    files = Memory({"x": torch.randn(6, 4)})
    o = retyped(whole(files, "x"), "BF16")
    assert (o.dtype, o.nbytes, o.how, o.ops) == ("BF16", 48, "values", ("F32 -> BF16",))
    assert torch.equal(made(files, o), files.state["x"].bfloat16())
    assert retyped(o, "BF16") is o


def test_what_nothing_makes_is_refused() -> None:
    """A tensor that the source lacks, and one of another shape."""
    small, large = model_of("llama", num_hidden_layers=1), model_of("llama", num_hidden_layers=1, intermediate_size=57)
    rules = arch.names(small)
    p = planner(Memory(drawn(small, rules)), side(small, "hf", rules), side(large, "hf", rules))
    with pytest.raises(InputRefused, match=r"mlp\.gate\.weight is \[56, 48\] in the source and \[57, 48\]") as e:
        p.outputs()
    assert e.value.code == "convert-shape"
    more = replace(small, layers=(replace(small.layers[0], attn_post_norm=small.layers[0].attn_norm),))
    rules = canonical(small)
    p = planner(Memory(drawn(small, rules)), side(small, "x", rules), side(more, "x", canonical(more)))
    with pytest.raises(InputRefused, match=r"nothing in the source makes layers\.0\.attn_post_norm\.weight"):
        p.outputs()
