"""`llamactl reference`: what it records, says and refuses, and where it never writes."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

made: Any = sys.modules["llamactl_tests_checkpoints"]  # loaded by conftest.py

torch: Any = pytest.importorskip("torch")
IDS = "1,5,9,3,7,2,8,4,6,1,5,9"
COUNT = 12
EVIL = "e\x1b[31m|<b>*[bold red]\u202ex`\u200by"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, speaker: Any) -> Path:
    """A small Llama with a tokenizer."""
    folder: Path = tmp_path_factory.mktemp("source") / "tiny"
    made.llama(folder)
    (folder / "tokenizer.json").write_text(json.dumps(speaker.tokenizer(vocab=speaker.alphabet()[32:127])))
    return folder


@pytest.fixture
def ref(tmp_path: Path) -> Path:
    return tmp_path / "ref.safetensors"


def ours(model: Path, ids: list[int]) -> tuple[Any, list[Any]]:
    """(T, V) logits of the whole network at once, and the stream after each layer."""
    from llamactl import arch
    from llamactl.api import load
    from llamactl.net.decoder import build
    from llamactl.net.weights import open_weights

    m = load(str(model)).model
    weights = open_weights(str(model), m, arch.names(m, "hf"), layout="hf")
    net = build(m, dtype=torch.float32)
    net.assign(weights, dtype=torch.float32)
    stream: list[Any] = []
    for block in net.layers:
        block.register_forward_pre_hook(lambda _, args: stream.append(args[0][0].clone()))
    with torch.no_grad():
        return net(torch.tensor([ids]))[0], stream


def failed(got: Any, code: int, word: str, *parts: str) -> None:
    """One error line, at most one line of help, nothing on stdout."""
    assert (got.code, got.out) == (code, ""), got.err
    assert re.fullmatch(rf"error\[{word}\]: [^\n]*\S\n(help: [^\n]*\S\n)?", got.err), got.err
    for part in parts:
        assert part in got.err


def test_what_is_recorded_is_what_the_network_says(cli: Any, model: Path, ref: Path) -> None:
    from llamactl.verify.recorded import read_recorded

    got = cli("reference", model, "-o", ref, "--tokens", IDS, "--layers", "--json")
    assert got.code == 0, got.err
    found = read_recorded(str(ref))
    ids = [int(i) for i in IDS.split(",")]
    logits, stream = ours(model, ids)
    assert found.ids.tolist() == ids
    assert torch.allclose(found.logits, logits, atol=1e-5)
    assert list(found.hidden) == [0, 1, 2]
    assert all(torch.allclose(found.hidden[n], x, atol=1e-5) for n, x in enumerate(stream))
    chances = logits.double().log_softmax(-1)
    loss = -sum(float(chances[n, i]) for n, i in enumerate(ids[1:])) / (COUNT - 1)
    r = got.model
    assert math.isclose(r["loss"], loss, rel_tol=1e-5)
    assert r["file_bytes"] == ref.stat().st_size
    want = {"id": "tiny", "family": "llama", "layout": "hf", "tokens": COUNT, "tokens_source": "given", "top_k": None,
            "layers": "states", "dtype": "fp32", "digest": "xxh3_128"}
    assert {k: r[k] for k in want} == want
    assert (found.about.config_digest, found.about.weights_digest) == (r["config_digest"], r["weights_digest"])
    assert (found.about.id, found.about.family, found.about.vocab) == ("tiny", "llama", r["vocab"])
    assert [t["name"] for t in r["tensors"]] == ["tokens", "logits", "hidden_states"]


def test_the_largest_alone(cli: Any, model: Path, ref: Path) -> None:
    from llamactl.verify.recorded import read_recorded

    r = cli("reference", model, "-o", ref, "--tokens", IDS, "--top-k", "3", "--json").model
    assert (r["top_k"], r["layers"]) == (3, None)
    found = read_recorded(str(ref))
    logits, _ = ours(model, [int(i) for i in IDS.split(",")])
    assert found.logits is None
    assert torch.allclose(found.top[0], logits.topk(3).values, atol=1e-5)
    assert torch.allclose(found.top[2], logits.logsumexp(-1), atol=1e-5)


def test_large_states_become_fingerprints(cli: Any, model: Path, ref: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.verify import recorded

    monkeypatch.setattr(recorded, "STATES_BYTES", 100)
    assert cli("reference", model, "-o", ref, "--tokens", IDS, "--layers", "--json").model["layers"] == "fingerprints"
    found = recorded.read_recorded(str(ref))
    _, stream = ours(model, [int(i) for i in IDS.split(",")])
    assert found.rms.shape == (3, COUNT)
    assert all(torch.allclose(found.projection[n], recorded.fingerprint(x)[1], atol=1e-4)
               for n, x in enumerate(stream))


def test_the_same_checkpoint_gives_the_same_bytes(cli: Any, model: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert cli("reference", model, "-o", tmp_path / f"{name}.safetensors", "-q").code == 0
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_digests_tell_other_files(cli: Any, model: Path, ref: Path, tmp_path: Path) -> None:
    first = cli("reference", model, "-o", ref, "--tokens", "1,2,3,4", "--json").model
    assert cli("convert", model, tmp_path / "half", "--dtype", "fp16", "--no-proof", "-q").code == 0
    other = cli("reference", tmp_path / "half", "-o", ref, "--tokens", "1,2,3,4", "--force", "--json").model
    assert first["weights_digest"] != other["weights_digest"]


# ---- the tokens


def test_the_probe_is_the_default(cli: Any, model: Path, ref: Path) -> None:
    r = cli("reference", model, "-o", ref, "--json").model
    assert r["tokens_source"] in ("passage", "ids")
    assert r["tokens"] > 100


def test_a_text(cli: Any, model: Path, ref: Path, tmp_path: Path) -> None:
    from llamactl.verify.recorded import read_recorded

    (tmp_path / "text.txt").write_text("Abc def" * 9)
    for option in ("--text", "--text-file"):
        r = cli("reference", model, "-o", ref, option, "text.txt", "--force", "--json").model
        assert (r["tokens_source"], r["tokens"]) == ("text", 63)
    ids = read_recorded(str(ref)).ids.tolist()
    assert ids[:7] == ids[7:14]
    (tmp_path / "long.txt").write_text("Abc" * 2000)
    assert cli("reference", model, "-o", ref, "--text", "long.txt", "--force", "--json").model["tokens"] == min(
        1024, json.loads((model / "config.json").read_text())["max_position_embeddings"])


@pytest.mark.parametrize("name", ["ids.npy", "ids.npz", "ids.safetensors", "ids.txt", "ids"])
def test_a_file_of_ids(cli: Any, model: Path, ref: Path, tmp_path: Path, name: str) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from llamactl.verify.recorded import read_recorded

    ids = np.array([[int(i) for i in IDS.split(",")]])
    if name.endswith(".npy"):
        np.save(tmp_path / name, ids)
    elif name.endswith(".npz"):
        np.savez(tmp_path / name, input_ids=ids)
    elif name.endswith(".safetensors"):
        save_file({"tokens": ids}, tmp_path / name)
    else:
        (tmp_path / name).write_text(f"[{IDS}]\n")
    assert cli("reference", model, "-o", ref, "--tokens", tmp_path / name, "-q").code == 0
    assert read_recorded(str(ref)).ids.tolist() == ids[0].tolist()


def test_few_tokens_are_warned_of(cli: Any, model: Path, ref: Path) -> None:
    got = cli("reference", model, "-o", ref, "--tokens", "3", "--json")
    assert got.model["loss"] is None
    assert [w["code"] for w in got.json()["warnings"]] == ["probe-short"]
    assert got.err == ""
    assert cli("reference", model, "-o", ref, "--tokens", "3", "--force").err.startswith("warning[probe-short]: ")


# ---- the answer


@pytest.mark.parametrize("format", ["plain", "table", "json", "csv", "md"])
def test_an_answer_is_all_there_is(cli: Any, model: Path, ref: Path, format: str) -> None:
    got = cli("reference", model, "-o", ref, "--layers", "--format", format, env={"COLUMNS": "200"})
    assert (got.code, got.err) == (0, "")
    assert got.out.endswith("\n")
    if format == "json":
        assert (got.json()["command"], got.json()["warnings"]) == ("reference", [])
    elif format == "csv":
        rows = list(csv.reader(io.StringIO(got.out)))
        assert rows[0] == ["tensor", "dtype", "shape", "nbytes"]
        assert {r[0] for r in rows[1:]} == {"tokens", "logits", "hidden_states"}
    else:
        assert f"{ref.stat().st_size:,} B" in got.out
        assert "hidden_states" not in got.out
        assert "hidden_states" in cli("reference", model, "-o", ref, "--layers", "--force", "-v").out


def test_quiet_is_the_bytes_alone(cli: Any, model: Path, ref: Path) -> None:
    got = cli("reference", model, "-o", ref, "-q")
    assert (got.out, got.err) == (f"{ref.stat().st_size}\n", "")


def test_the_inputs_say_what_was_asked(cli: Any, model: Path, ref: Path) -> None:
    body = cli("reference", model, "-o", ref, "--tokens", IDS, "--top-k", "2", "--layers", "--json").json()
    assert body["inputs"] == {"output": str(ref), "tokens": IDS, "text": None, "layers": True, "top_k": 2,
                              "force": False}
    assert body["model"]["path"] == str(model / "config.json")


# ---- the place


def test_an_old_file_stays(cli: Any, model: Path, ref: Path) -> None:
    ref.write_bytes(b"mine")
    failed(cli("reference", model, "-o", ref), 5, "exists", str(ref))
    failed(cli("reference", model, "-o", ref, "--force"), 5, "output-foreign", "no recorded reference")
    assert ref.read_bytes() == b"mine"


def test_force_replaces_a_reference_alone(cli: Any, model: Path, ref: Path) -> None:
    assert cli("reference", model, "-o", ref, "-q", "--tokens", IDS).code == 0
    first = ref.read_bytes()
    failed(cli("reference", model, "-o", ref), 5, "exists", "--force replaces it")
    assert ref.read_bytes() == first
    assert cli("reference", model, "-o", ref, "--force", "-q", "--tokens", "1,2,3").code == 0
    assert ref.read_bytes() != first
    weights = model / "model.safetensors"
    before = weights.read_bytes()
    failed(cli("reference", model, "-o", weights, "--force"), 5, "output-foreign")
    assert weights.read_bytes() == before


@pytest.mark.parametrize(("name", "code"), [
    ("none/ref.safetensors", "output-parent"), ("file/ref.safetensors", "output-parent"),
    ("dir.safetensors", "is-a-folder"),
])
def test_a_place_that_is_none(cli: Any, model: Path, tmp_path: Path, name: str, code: str) -> None:
    (tmp_path / "dir.safetensors").mkdir()
    (tmp_path / "file").write_text("")
    failed(cli("reference", model, "-o", tmp_path / name), 5, code)


def test_a_failure_leaves_nothing(cli: Any, model: Path, ref: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.verify.recorded import Encoded

    def broken(self: Any) -> Any:
        yield b"12345678"
        raise OSError(28, "No space left on device")

    before = sorted(os.listdir(ref.parent))
    with monkeypatch.context() as m:
        m.setattr(Encoded, "blocks", broken)
        failed(cli("reference", model, "-o", ref, "--tokens", IDS), 5, "not-written", "No space left")
    assert sorted(os.listdir(ref.parent)) == before


def test_what_does_not_fit_on_the_disk_is_refused_before_the_work(cli: Any, model: Path, ref: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil
    from collections import namedtuple

    from llamactl.verify import recording

    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(10**9, 10**9, 1000))
    monkeypatch.setattr(recording, "streamed", lambda *a, **k: pytest.fail("it was computed"))
    failed(cli("reference", model, "-o", ref, "--tokens", IDS), 5, "no-space", "1,000 are free")


# ---- what is refused


@pytest.mark.parametrize(("args", "code", "word", "parts"), [
    ((), 2, "usage", ("-o is missing", "llamactl reference ./my-model -o")),
    (("-o", "ref.npy"), 2, "usage", (".safetensors",)), (("-o", ""), 2, "usage", ("ref.safetensors",)),
    (("-o", "r.safetensors", "--tokens", "1", "--text", "x"), 2, "usage", ("--tokens",)),
    (("-o", "r.safetensors", "--top-k", "0"), 2, "usage", ("top-k",)),
    (("-o", "r.safetensors", "--tokens", "1,x"), 2, "usage", ("'x' is not a token id",)),
    (("-o", "r.safetensors", "--tokens", ""), 2, "usage", ("0 token ids",)),
    (("-o", "r.safetensors", "--tokens", "1,999999"), 3, "token-range", ("999999",)),
    (("-o", "r.safetensors", "--tokens", "absent.npy"), 4, "not-found", ("absent.npy",)),
    (("-o", "r.safetensors", "--tokens", "words.txt"), 3, "tokens-format", ("words.txt", "'once'")),
    (("-o", "r.safetensors", "--text", "absent.txt"), 4, "not-found", ("absent.txt",)),
    (("-o", "r.safetensors", "--text", "pipe"), 3, "not-a-file", ("named pipe",)),
    (("-o", "r.safetensors", "--tokens", "pipe"), 3, "not-a-file", ("named pipe",)),
    (("-o", "r.safetensors", "--text", "latin.txt"), 3, "prompt-encoding", ("0xe9",)),
])
def test_a_wrong_command_line_is_one_line(cli: Any, model: Path, tmp_path: Path, args: tuple[str, ...], code: int,
                                          word: str, parts: tuple[str, ...]) -> None:
    (tmp_path / "words.txt").write_text("once upon a time")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    os.mkfifo(tmp_path / "pipe")
    failed(cli("reference", model, *args), code, word, *parts)
    assert not (tmp_path / "r.safetensors").exists()


def test_weights_that_give_no_numbers_are_no_reference(cli: Any, model: Path, ref: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    state = load_file(model / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for ids in (IDS, "1"):
        failed(cli("reference", folder, "-o", ref, "--tokens", ids), 3, "not-finite")
    assert not ref.exists()


def test_a_hostile_name_is_printed_harmless(cli: Any, model: Path, tmp_path: Path) -> None:
    got = cli("reference", model, "-o", tmp_path / f"{EVIL}.safetensors", "--tokens", IDS)
    assert got.code == 0
    assert "\x1b" not in got.out
    assert "\u202e" not in got.out
    failed(cli("reference", model, "-o", tmp_path / f"{EVIL}.safetensors"), 5, "exists")
    failed(cli("reference", model, "-o", tmp_path / "x.safetensors", "--tokens", EVIL), 2, "usage")


def test_no_model_here_is_told_with_an_example(cli: Any, tmp_path: Path) -> None:
    got = cli("reference", "-o", "r.safetensors")
    assert got.code == 2
    assert "llamactl reference ./my-model -o reference.safetensors" in got.err


def test_the_model_of_the_current_folder(cli: Any, model: Path, tmp_path: Path) -> None:
    assert cli("reference", "-o", tmp_path / "r.safetensors", "-q", cwd=model).code == 0
    assert not list(model.glob("*reference*"))
