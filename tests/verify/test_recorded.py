"""A recorded reference: what goes in comes out, bit for bit, and nothing else is taken for one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import atomic
from llamactl.errors import InputRefused, NotAvailable
from llamactl.verify import recorded
from llamactl.verify.recorded import (
    About,
    Layers,
    Recorded,
    config_digest,
    encode,
    fingerprint,
    is_recorded,
    read_recorded,
    top_of,
)
from llamactl.verify.saved import read_saved

T, V, D, L = 6, 40, 24, 3
ABOUT = About(version="1.2.3", id="a/b", family="llama", layout="hf", computed_in="fp32", source="the passage",
              config_digest="c" * 32, weights_digest="d" * 32, vocab=V)
FIRST = [1, 1, 1, 1, -1, -1, 1, -1, 1, -1, 1, -1, 1, -1, -1, 1]  # signs


@pytest.fixture
def parts() -> dict[str, Any]:
    make = torch.Generator().manual_seed(1)
    return {"about": ABOUT, "ids": torch.arange(T), "logits": torch.randn(T, V, generator=make) * 4,
            "hidden": {n: torch.randn(T, D, generator=make) for n in range(L + 1)}}


def written(path: Path, r: Recorded) -> Path:
    e = encode(r)
    atomic.create(str(path), e.blocks(), force=True)
    assert path.stat().st_size == e.nbytes
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Recorded], Path]:
    return lambda r: written(tmp_path / "ref.safetensors", r)


def kept(states: dict[int, Tensor]) -> tuple[dict[int, Tensor] | None, Tensor | None, Tensor | None]:
    """What Layers makes of the states."""
    layers = Layers(len(states) - 1, T, D)
    for n, x in states.items():
        layers(n, x[None])
    return layers.tensors()


def test_all_of_it_comes_back(write: Any, parts: dict[str, Any]) -> None:
    path = write(Recorded(**parts))
    found = read_recorded(str(path))
    assert found.about == ABOUT
    assert torch.equal(found.ids, parts["ids"])
    assert found.logits is not None
    assert torch.equal(found.logits, parts["logits"])
    assert found.hidden is not None
    assert list(found.hidden) == list(range(L + 1))
    assert all(torch.equal(found.hidden[n], parts["hidden"][n]) for n in range(L + 1))
    assert (found.top, found.rms, found.projection, found.layers) == (None, None, None, L)


def test_the_largest_alone(write: Any, parts: dict[str, Any]) -> None:
    x = parts.pop("logits")
    path = write(Recorded(**{**parts, "hidden": None}, top=top_of(x, 5)))
    found = read_recorded(str(path))
    assert (found.logits, found.layers) == (None, None)
    assert found.top is not None
    values, at, total = found.top
    assert values.shape == at.shape == (T, 5)
    assert torch.equal(x.gather(1, at), values)
    assert torch.equal(values, x.sort(descending=True).values[:, :5])
    chances = x.double().log_softmax(-1).gather(1, at)
    assert torch.allclose(values.double() - total[:, None].double(), chances, atol=1e-6)
    assert path.stat().st_size < 4000
    assert top_of(x, 10**6)[0].shape == (T, V)


def test_large_states_become_fingerprints(write: Any, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kept(parts["hidden"])
    assert whole[0] is not None
    assert whole[1:] == (None, None)
    monkeypatch.setattr(recorded, "STATES_BYTES", 4 * (L + 1) * T * D - 1)
    hidden, rms, projection = kept(parts["hidden"])
    assert hidden is None
    found = read_recorded(str(write(Recorded(**{**parts, "hidden": hidden}, rms=rms, projection=projection))))
    assert (found.hidden, found.layers) == (None, L)
    assert found.rms is not None
    assert found.projection is not None
    for n, x in parts["hidden"].items():
        assert torch.allclose(found.rms[n], x.square().mean(-1).sqrt())
        assert torch.equal(found.projection[n], fingerprint(x)[1])


def test_a_state_is_kept_as_it_was_then() -> None:
    layers, x = Layers(0, T, D), torch.ones(1, T, D)
    layers(0, x)
    x.zero_()
    hidden, _, _ = layers.tensors()
    assert hidden is not None
    assert float(hidden[0].sum()) == T * D


def test_a_fingerprint_is_the_same_everywhere() -> None:
    """Written down once; and sums of signs: each column within the norm of the row, differing from the others."""
    rms, sums = fingerprint(torch.arange(1.0, 13.0).view(2, 6))
    assert [round(float(v), 5) for v in rms] == [3.89444, 9.65229]
    signs = torch.stack([fingerprint(torch.eye(6)[n : n + 1])[1][0] * 6**0.5 for n in range(6)])
    assert torch.allclose(signs.abs(), torch.ones(6, 16))
    assert torch.allclose(sums, torch.arange(1.0, 13.0).view(2, 6) @ signs / 6**0.5)
    assert [int(s) for s in signs[0].sign()] == FIRST


def test_a_fingerprint_moves_with_the_stream() -> None:
    """A change of 1e-3 of a token's stream, in any direction, is seen as about as much, and in that token alone."""
    make = torch.Generator().manual_seed(0)
    x = torch.randn(8, 512, generator=make)
    d = torch.randn(512, generator=make)
    y = x.clone()
    y[3] += 1e-3 * d * x[3].norm() / d.norm()
    moved = (fingerprint(y)[1] - fingerprint(x)[1]).norm(dim=-1) / 4
    assert 3e-4 < float(moved[3] / x[3].norm() * 512**0.5) < 3e-2
    assert float(moved[:3].abs().max() + moved[4:].abs().max()) == 0


def test_the_same_reference_is_the_same_bytes(tmp_path: Path, parts: dict[str, Any]) -> None:
    a, b = (written(tmp_path / n, Recorded(**parts)).read_bytes() for n in ("a.safetensors", "b.safetensors"))
    assert a == b


def test_everything_lies_aligned_and_others_read_it(write: Any, parts: dict[str, Any]) -> None:
    from safetensors import safe_open

    parts["ids"], parts["logits"] = parts["ids"][:5], parts["logits"][:5, :39]  # an odd number of four bytes
    parts["hidden"] = {n: x[:5] for n, x in parts["hidden"].items()}
    path = write(Recorded(**{**parts, "about": replace(ABOUT, vocab=39)}))
    with safe_open(path, framework="pt") as f:
        assert torch.equal(f.get_tensor("logits"), parts["logits"])
        assert torch.equal(f.get_tensor("hidden_states"), torch.stack(list(parts["hidden"].values())))
        assert f.metadata() == {"format": "pt", "llamactl-reference": "1", "version": "1.2.3", "id": "a/b",
                                "family": "llama", "layout": "hf", "computed_in": "fp32", "source": "the passage",
                                "config_digest": "c" * 32, "weights_digest": "d" * 32, "vocab": "39"}
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    del head["__metadata__"]
    assert all((start + t["data_offsets"][0]) % (8 if t["dtype"] == "I64" else 4) == 0 for t in head.values())


# ---- as a candidate


def test_it_is_a_candidate_too(write: Any, parts: dict[str, Any]) -> None:
    found = read_saved(str(write(Recorded(**parts))))
    assert found.logits is not None
    assert torch.equal(found.logits, parts["logits"])
    assert found.ids is not None
    assert found.ids.tolist() == list(range(T))
    assert list(found.hidden) == list(range(L + 1))
    assert (found.vocab, found.dtype, found.computed_in) == (V, "fp32", "fp32")


def test_the_largest_alone_are_a_candidate_too(write: Any, parts: dict[str, Any]) -> None:
    top = top_of(parts.pop("logits"), 5)
    found = read_saved(str(write(Recorded(**parts, top=top))))
    assert (found.logits, found.vocab) == (None, V)
    assert found.top is not None
    assert all(torch.equal(a, b) for a, b in zip(found.top, top, strict=True))


# ---- what is none


def header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite the header of a safetensors file; the data stays."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    head = json.loads(data[8:start])
    change(head)
    text = json.dumps(head).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])


@pytest.mark.parametrize(("key", "value", "part"), [
    ("llamactl-reference", None, "no recorded reference"), ("llamactl-reference", "2", "form '2'"),
    ("vocab", None, "'vocab'"), ("vocab", "41", "logits is F32 [6, 40], not F32 (6, 41)"), ("vocab", "-1", "'-1'"),
    ("vocab", "5", "vocabulary of 5"), ("vocab", "9" * 5000, "no number"), ("vocab", "٤٠", "no number"),
    ("family", None, "'family'"), ("weights_digest", None, "'weights_digest'"),
])
def test_other_metadata_are_refused(write: Any, parts: dict[str, Any], key: str, value: str | None, part: str) -> None:
    path = write(Recorded(**parts))

    def change(head: dict[str, Any]) -> None:
        if value is None:
            del head["__metadata__"][key]
        else:
            head["__metadata__"][key] = value

    header(path, change)
    with pytest.raises(InputRefused) as caught:
        read_recorded(str(path))
    assert (caught.value.code, caught.value.path) == ("recorded-format", str(path))
    assert part in caught.value.message


@pytest.mark.parametrize(("change", "part"), [
    ({"ids": torch.arange(T) - 1}, "vocabulary"), ({"ids": torch.arange(T) + V}, "vocabulary"),
    ({"ids": torch.arange(T + 1)}, "logits is F32 [6, 40]"), ({"ids": torch.arange(0)}, "tokens"),
    ({"logits": None}, "either"), ({"top": top_of(torch.randn(T, V), 3)}, "either"),
    ({"logits": torch.randn(V)}, "logits is F32 [40]"), ({"hidden": {0: torch.ones(T + 1, D)}}, "hidden_states"),
    ({"rms": torch.ones(L + 1, T)}, "belong together"),
    ({"rms": torch.ones(L + 1, T), "projection": torch.ones(L, T, 16)}, "belong together"),
    ({"rms": torch.ones(L + 1, T), "projection": torch.ones(L + 1, T, 15)}, "layers.projection"),
    ({"logits": None, "top": (torch.ones(T, 3), torch.full((T, 3), V), torch.ones(T))}, "belong together"),
    ({"logits": None, "top": (torch.ones(T, 3), torch.zeros(T, 4), torch.ones(T))}, "belong together"),
    ({"logits": None, "top": (torch.ones(T, 3), torch.zeros(T, 3), torch.ones(T + 1))}, "top.logsumexp"),
])
def test_parts_that_do_not_fit_are_refused(write: Any, parts: dict[str, Any], change: dict[str, Any], part: str
                                           ) -> None:
    path = write(replace(Recorded(**parts), **change))
    with pytest.raises(InputRefused) as caught:
        read_recorded(str(path))
    assert caught.value.code == "recorded-format"
    assert part in caught.value.message


def test_a_lost_part_of_top_is_refused(write: Any, parts: dict[str, Any]) -> None:
    path = write(Recorded(**{**parts, "hidden": None, "logits": None}, top=top_of(parts["logits"], 2)))

    def change(head: dict[str, Any]) -> None:
        head["another"] = head.pop("top.logsumexp")

    header(path, change)
    with pytest.raises(InputRefused, match="either"):
        read_recorded(str(path))


def test_what_is_a_reference_and_what_is_not(tmp_path: Path, write: Any, parts: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    path = write(Recorded(**parts))
    assert is_recorded(str(path))
    save_file({"logits": torch.ones(2, 3)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    (tmp_path / "y.safetensors").write_bytes(path.read_bytes()[:100])
    os.mkfifo(tmp_path / "z.safetensors")
    assert not any(is_recorded(str(tmp_path / f"{n}.safetensors")) for n in ("x", "y", "z", "absent"))
    with pytest.raises(InputRefused):
        read_recorded(str(tmp_path / "x.safetensors"))
    with pytest.raises(NotAvailable):
        read_recorded(str(tmp_path / "absent.safetensors"))


# ---- digests


class Held:
    """One tensor of a header."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str = "F32") -> None:
        self.name, self.dtype, self.shape, self.nbytes = name, dtype, shape, 4


class Files:
    """Some tensors by name."""

    def __init__(self, *tensors: Held) -> None:
        self.tensors = {t.name: t for t in tensors}


def test_digests_tell_what_differs_and_no_more() -> None:
    assert config_digest({"a": 1, "b": [2]}) == config_digest({"b": [2], "a": 1}) != config_digest({"a": 1, "b": [3]})
    of: Any = recorded.weights_digest
    one = of(Files(Held("a", (2,)), Held("b", (3,))))
    assert one == of(Files(Held("b", (3,)), Held("a", (2,))))
    others = {of(Files(Held("a", (2,)), Held("b", (4,)))), of(Files(Held("a", (2,)), Held("c", (3,)))),
              of(Files(Held("a", (2,)), Held("b", (3,), "BF16"))), of(Files(Held("a", (2,))))}
    assert len(others | {one}) == 5
