"""`llamactl verify`: its exit codes, its streams, its files, what it refuses, and mistakes that people reported."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

made: Any = sys.modules["llamactl_tests_checkpoints"]  # loaded by conftest.py

torch: Any = pytest.importorskip("torch")
np: Any = pytest.importorskip("numpy")
Floats = dict[str, Any]
COUNT = 70  # enough for nothing to be said of the text
IDS = ",".join(str((7 * i * i + 3) % 101) for i in range(COUNT))


def drawn(shapes: Mapping[str, tuple[int, ...]], **factors: float) -> Floats:
    """{name: tensor}: matrices of std 0.3, norms 1 +- 0.3; the embedding and the head times a factor."""
    out = {}
    for name, shape in shapes.items():
        draw = random.Random(name)
        around = 1.0 if len(shape) == 1 and name.endswith("weight") else 0.0
        factor = next((x for part, x in factors.items() if part in name), 1.0)
        out[name] = torch.tensor([factor * (around + draw.gauss(0, 0.3)) for _ in range(math.prod(shape))]).view(shape)
    return out


def save(folder: Path, config: Mapping[str, Any], tensors: Floats) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float32"}), encoding="utf-8")
    made.write(folder / "model.safetensors", {n: made.Tensor("F32", tuple(t.shape), t.contiguous().numpy().tobytes())
                                              for n, t in tensors.items()})
    return folder


def llama(**factors: float) -> Floats:
    return drawn(made.llama_shapes(made.LLAMA), **factors)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("good") / "good", made.LLAMA, llama())


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with another activation."""
    return save(tmp_path_factory.mktemp("wrong") / "wrong", {**made.LLAMA, "hidden_act": "gelu"}, llama())


@pytest.fixture(scope="module")
def right(good: Path) -> Any:
    """(T, V) logits of `good` on IDS, from the network at once."""
    from llamactl import arch
    from llamactl.api import load
    from llamactl.net.decoder import build
    from llamactl.net.weights import open_weights

    m = load(str(good)).model
    net = build(m, dtype=torch.float32)
    net.assign(open_weights(str(good), m, arch.names(m, "hf"), layout="hf"), dtype=torch.float32)
    with torch.no_grad():
        return net(torch.tensor([[int(i) for i in IDS.split(",")]]))[0]


@pytest.fixture
def saved(right: Any, tmp_path: Path) -> Path:
    np.save(tmp_path / "right.npy", right.numpy())
    return tmp_path / "right.npy"


def failed(got: Any, code: int, word: str, *parts: str) -> None:
    """One error line, at most one line of help, nothing on stdout."""
    assert (got.code, got.out) == (code, ""), (got.code, got.err)
    last = [x for x in got.err.splitlines() if not x.startswith("warning")]
    assert re.fullmatch(rf"error\[{word}\]: [^\n]*\S", last[0]), got.err
    assert len(last) == 1 or (len(last) == 2 and last[1].startswith("help: ")), got.err
    for part in parts:
        assert part in got.err


def verdict(got: Any, code: int, word: str) -> dict[str, Any]:
    """The result of --json."""
    assert got.code == code, got.err
    result: dict[str, Any] = got.json()["result"]
    assert result["verdict"] == word, result["why"]
    return result


# ---- exit codes and streams


def test_what_passes_exits_0(cli: Any, good: Path, saved: Path) -> None:
    got = cli("verify", good, "--candidate", saved, "--tokens", IDS)
    assert (got.code, got.err) == (0, "")
    assert got.out.startswith("verdict ")
    assert got.out.isascii()
    assert "\x1b" not in got.out
    r = verdict(cli("verify", good, "--candidate", good, "--tokens", IDS, "--json"), 0, "equal")
    assert [(s["label"], s["kind"]) for s in r["sides"]] == [("the checkpoint", "checkpoint"),
                                                             ("the candidate", "checkpoint")]
    assert r["probe"]["tokens"] == COUNT


def test_a_mistake_exits_1_and_is_named(cli: Any, good: Path, wrong: Path) -> None:
    got = cli("verify", good, "--candidate", wrong, "--tokens", IDS)
    assert got.code == 1
    assert "activation=gelu" in got.out
    assert re.fullmatch(r"error\[verify\]: the candidate is the checkpoint with this mistake: .*\n", got.err)
    r = verdict(cli("verify", wrong, "--reference", good, "--tokens", IDS, "--json"), 1, "explained")
    (e,) = r["explanations"]
    assert (e["edit"], e["scope"]) == ("activation=gelu", "all layers")
    assert r["why"].startswith("the checkpoint is the reference with this mistake")
    assert [s["label"] for s in r["sides"]] == ["the reference", "the checkpoint"]


def test_without_a_diagnosis_it_is_different(cli: Any, good: Path, wrong: Path) -> None:
    r = verdict(cli("verify", good, "--candidate", wrong, "--tokens", IDS, "--no-explain", "--json"), 1, "different")
    assert (r["explanations"], r["tried"]) == ([], 0)


def test_what_cannot_be_judged_exits_4(cli: Any, good: Path) -> None:
    got = cli("verify", good, "--candidate", good, "--tokens", "5")
    assert got.code == 4
    assert "error[cannot-judge]: " in got.err
    assert "one token" in got.err


def test_quiet_is_the_verdict(cli: Any, good: Path, wrong: Path) -> None:
    assert cli("verify", good, "--candidate", good, "--tokens", IDS, "-q").out == "equal\n"
    got = cli("verify", good, "--candidate", wrong, "--tokens", IDS, "-q", "--no-explain")
    assert (got.code, got.out) == (1, "different\n")


def test_json_follows_its_schema(cli: Any, good: Path, wrong: Path) -> None:
    import jsonschema

    schema = json.loads(cli("schema", "verify").out)
    got = cli("verify", good, "--candidate", wrong, "--tokens", IDS, "--json")
    body = got.json()
    jsonschema.validate(body, schema)
    assert (body["schema"], body["command"], body["model"]["id"]) == (1, "verify", "good")
    assert body["inputs"]["candidate"] == str(wrong)
    assert body["result"]["measures"]["kl_position_0"] > 0
    assert body["result"]["floor"]["limit"] < body["result"]["measures"]["max_abs_dlogit"]
    assert [i["nan"] for i in body["result"]["inventory"]] == [0, 0]


@pytest.mark.parametrize("form", ["table", "csv", "md", "plain"])
def test_every_format(form: str, cli: Any, good: Path, saved: Path) -> None:
    got = cli("verify", good, "--candidate", saved, "--tokens", IDS, "--format", form)
    assert (got.code, got.err) == (0, "")
    assert "same" in got.out or "equal" in got.out


# ---- what is wrong before anything runs


@pytest.mark.parametrize(("args", "part"), [
    (("--tokens", "1,2", "--text", "x.txt"), "leave out"), (("--selftest", "--candidate", "x.npy"), "leave out"),
    (("--selftest", "--reference", "x"), "leave out"), (("--report", "x.txt"), ".html"),
    (("--junit", "x.html"), ".xml"), (("--seconds", "0"), "--seconds"),
    (("--accept", "activaton=gelu", "--candidate", "x.npy"), "did you mean"),
    (("--candidate", "transformers"), "transformers"), (("--tokens", "1,x"), "--tokens"), (("--candidat", "x"), "")])
def test_wrong_options_exit_2(args: tuple[str, ...], part: str, cli: Any, good: Path) -> None:
    got = cli("verify", good, *args)
    assert (got.code, got.out) == (2, ""), got.err
    assert got.err.count("error[") == 1
    assert part in got.err


def test_no_checkpoint(cli: Any, tmp_path: Path) -> None:
    got = cli("verify", cwd=tmp_path)
    assert (got.code, got.out) == (2, "")
    assert "llamactl verify ./my-model --candidate logits.npy" in got.err


def test_what_is_not_there_exits_4(cli: Any, good: Path, tmp_path: Path) -> None:
    failed(cli("verify", good, "--candidate", tmp_path / "none.npy"), 4, "not-found", "none.npy")
    failed(cli("verify", good, "--reference", tmp_path / "nowhere"), 4, "not-found", "nowhere")
    failed(cli("verify", tmp_path / "nowhere", "--candidate", good), 4, "not-found", "nowhere")
    failed(cli("verify", good, "--candidate", "nowhere_at_all:port", "--tokens", IDS), 4, "callable-not-found")
    failed(cli("verify", good, "--candidate", good, "--tokens", tmp_path / "ids.npy"), 4, "not-found", "ids.npy")


def test_a_corrupt_candidate_exits_3(cli: Any, good: Path, saved: Path, tmp_path: Path) -> None:
    raw = saved.read_bytes()
    for name, data in (("cut.npy", raw[:-100]), ("head.npy", b"\x93NUMPY\x01\x00"), ("text.npy", b"hello"),
                       ("z.npz", b"PK\x03\x04nothing"), ("empty.npy", b"")):
        (tmp_path / name).write_bytes(data)
        got = cli("verify", good, "--candidate", tmp_path / name, "--tokens", IDS)
        assert (got.code, got.out) == (3, ""), (name, got.err)
        assert name in got.err
    np.save(tmp_path / "turned.npy", np.zeros((112, COUNT), np.float32))
    failed(cli("verify", good, "--candidate", tmp_path / "turned.npy", "--tokens", IDS), 3, "saved-shape", "transpose")
    failed(cli("verify", good, "--candidate", saved, "--tokens", "1,2,3"), 3, "tokens-differ", str(COUNT), "3")


def test_fewer_rows_than_the_probe_has(cli: Any, good: Path, saved: Path) -> None:
    """Logits of the first tokens are held against the first tokens, and it is said."""
    got = cli("verify", good, "--candidate", saved, "--tokens", f"{IDS},9,9,9", "--json")
    verdict(got, 0, "same" if got.json()["result"]["verdict"] == "same" else "equal")
    assert got.json()["result"]["probe"]["tokens"] == COUNT
    assert "tokens-cut" in [w["code"] for w in got.json()["warnings"]]


def test_other_tokens_than_the_file_says(cli: Any, good: Path, right: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", logits=right.numpy(), tokens=np.array([int(i) for i in IDS.split(",")]))
    assert cli("verify", good, "--candidate", tmp_path / "x.npz").code == 0
    failed(cli("verify", good, "--candidate", tmp_path / "x.npz", "--tokens", IDS.replace("3", "4", 1)), 2,
           "tokens-differ")


# ---- references


def test_without_any_reference(cli: Any, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    got = cli("verify", good, "--json")
    r = verdict(got, 4, "cannot-judge")
    assert "logits not judged" in r["why"]
    assert "llamactl reference" in r["why"]
    assert "--reference" in got.err
    assert (r["measures"], len(r["inventory"])) == (None, 1)
    failed(cli("verify", good, "--reference", "transformers", "--tokens", IDS), 4, "extra-missing", "pip install")


def test_transformers_is_the_reference_where_it_can(cli: Any, good: Path) -> None:
    pytest.importorskip("transformers")
    r = verdict(cli("verify", good, "--tokens", IDS, "--json"), 0, "same")
    assert [s["kind"] for s in r["sides"]] == ["transformers", "checkpoint"]
    assert r["measures"]["max_abs_dlogit"] > 0


def test_the_reference_beside_the_checkpoint_is_taken(cli: Any, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", made.LLAMA, llama())
    beside = folder / "llamactl-reference.safetensors"
    assert cli("reference", folder, "-o", beside, "--tokens", IDS, "--layers").code == 0
    r = verdict(cli("verify", folder, "--json"), 0, "equal")
    assert r["sides"][0]["kind"] == "recorded"
    assert r["sides"][0]["ref"] == str(beside)
    assert r["probe"]["tokens"] == COUNT
    (folder / "config.json").write_text(json.dumps({**made.LLAMA, "hidden_act": "relu"}))
    got = cli("verify", folder, "--json")
    r = verdict(got, 1, "explained")
    assert [e["edit"] for e in r["explanations"]] == ["activation=silu"]  # what leads back
    assert "the reference is the checkpoint with this change" in got.err
    beside.write_bytes(beside.read_bytes()[:-10])
    assert cli("verify", folder).code == 3


def test_two_references_are_judged_one_after_the_other(cli: Any, good: Path, wrong: Path, saved: Path) -> None:
    both = ("--reference", good, "--candidate", saved, "--tokens", IDS, "--no-explain", "--json")
    verdict(cli("verify", good, *both), 0, verdict_of(cli("verify", good, *both)))
    r = verdict(cli("verify", wrong, *both), 1, "different")
    assert r["sides"][0]["label"] == "the reference"


def verdict_of(got: Any) -> str:
    word: str = got.json()["result"]["verdict"]
    assert word in ("same", "equal")
    return word


# ---- somebody's code

CODE = """
import torch
x = torch.from_numpy(__import__("numpy").load({path!r}))
def port(ids): return x[: ids.shape[-1]]
def broken(ids): raise KeyError("wte")
def nan(ids): return x[: ids.shape[-1]] * float("nan")
"""


def test_a_callable(cli: Any, good: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_port_of_a_test.py").write_text(CODE.format(path=str(saved)))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    r = verdict(cli("verify", good, "--candidate", "a_port_of_a_test:port", "--tokens", IDS, "--json"), 0, "equal")
    assert r["sides"][1]["kind"] == "callable"
    failed(cli("verify", good, "--candidate", "a_port_of_a_test:broken", "--tokens", IDS), 3, "candidate-failed", "wte")
    verdict(cli("verify", good, "--candidate", "a_port_of_a_test:nan", "--tokens", IDS, "--json"), 1, "different")
    sys.modules.pop("a_port_of_a_test", None)
