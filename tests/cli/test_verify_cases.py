"""Mistakes that people reported and no check saw, made small: verify sees each of them and says which it is."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("llamactl_tests_verify", Path(__file__).with_name("test_verify.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
base: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(base)
made, torch, save, verdict = base.made, base.torch, base.save, base.verdict
LAYERS = made.LLAMA["num_hidden_layers"]
good = base.good


def turned(w: Any, heads: int) -> Any:
    """Rows for neighbouring pairs, of rows for halves."""
    return w.view(heads, 2, w.shape[0] // heads // 2, -1).transpose(1, 2).reshape(w.shape)


def swapped(t: dict[str, Any]) -> dict[str, Any]:
    out = dict(t)
    for i in range(LAYERS):
        gate, up = (f"model.layers.{i}.mlp.{x}_proj.weight" for x in ("gate", "up"))
        out[gate], out[up] = t[up], t[gate]
    return out


def test_one_token_is_blind_to_q_and_k(cli: Callable[..., Any], good: Path, tmp_path: Path) -> None:
    t = base.llama()
    for i in range(LAYERS):
        for x, heads in (("q", 8), ("k", 2)):
            name = f"model.layers.{i}.self_attn.{x}_proj.weight"
            t[name] = turned(t[name], heads)
    port = save(tmp_path / "port", made.LLAMA, t)
    one = verdict(cli("verify", port, "--reference", good, "--tokens", "5", "--json"), 4, "cannot-judge")
    assert "one token" in one["why"]
    r = verdict(cli("verify", port, "--reference", good, "--json"), 1, "explained")
    (e,) = r["explanations"]
    assert {e["edit"], *e["equivalent"]} & {"rope_rows=both:half>adjacent", "rope_pairs=adjacent"}
    assert r["measures"]["kl_position_0"] < 1e-9 < r["measures"]["max_kl"]
    assert r["probe"]["tokens"] > 32
    few = cli("verify", port, "--reference", good, "--tokens", "5,9,2", "--no-explain", "--json")
    assert few.code == 1


def test_nan_must_fail(cli: Callable[..., Any], good: Path, tmp_path: Path) -> None:
    t = base.llama()
    t["model.norm.weight"][3] = float("nan")
    port = save(tmp_path / "port", made.LLAMA, t)
    for a, b in ((port, good), (good, port), (port, port)):
        r = verdict(cli("verify", a, "--reference", b, "--json"), 1, "different")
        assert "nan" in r["why"]
        assert r["explanations"] == []
        assert r["measures"]["max_kl"] is None
        assert sum(i["nan"] for i in r["inventory"]) == (1 if a != b else 2)
    plain = cli("verify", port, "--reference", good)
    assert plain.code == 1
    assert "model.norm.weight" in plain.out


def test_a_weight_that_is_no_number_fails_though_no_token_meets_it(cli: Callable[..., Any], good: Path, tmp_path: Path
                                                                   ) -> None:
    t = base.llama()
    t["model.embed_tokens.weight"][7, 0] = float("nan")
    port = save(tmp_path / "port", made.LLAMA, t)
    r = verdict(cli("verify", port, "--reference", good, "--tokens", "5,9,2,11", "--json"), 1, "different")
    assert "model.embed_tokens.weight: 1 of" in r["why"]
    assert r["measures"]["non_finite"] == [0, 0]
    assert "NaN" not in cli("verify", port, "--reference", good, "--json").out


@pytest.mark.parametrize("beside", ["reference", "candidate"])
def test_an_epsilon_taken_from_the_code(beside: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    """Embeddings are small, so that it matters."""
    t = base.llama(embed_tokens=0.003)
    right = save(tmp_path / "right", {**made.LLAMA, "rms_norm_eps": 1e-6}, t)
    port = save(tmp_path / "port", made.LLAMA, t)
    args = (port, "--reference", right) if beside == "reference" else (right, "--candidate", port)
    r = verdict(cli("verify", *args, "--json"), 1, "explained")
    (e,) = r["explanations"]
    assert e["edit"].startswith("norm_eps=1e-")
    assert float(e["edit"].partition("=")[2].partition(":")[0]) == 1e-5


def test_tanh_gelu_or_exact(cli: Callable[..., Any], tmp_path: Path) -> None:
    t = base.drawn(made.gpt2_shapes(made.GPT2))
    right = save(tmp_path / "right", made.GPT2, t)
    port = save(tmp_path / "port", {**made.GPT2, "activation_function": "gelu"}, t)
    r = verdict(cli("verify", port, "--reference", right, "--json"), 1, "explained")
    assert [e["edit"] for e in r["explanations"]] == ["activation=gelu"]
    assert r["measures"]["max_abs_dlogit"] < 0.1  # an absolute tolerance would not see it


def test_small_logits_prove_nothing(cli: Callable[..., Any], tmp_path: Path) -> None:
    t = base.llama(lm_head=0.05)
    right = save(tmp_path / "right", made.LLAMA, t)
    port = save(tmp_path / "port", made.LLAMA, swapped(t))
    r = verdict(cli("verify", port, "--reference", right, "--accept", "weights=bf16", "--json"), 1, "explained")
    assert [(e["edit"], e["scope"]) for e in r["explanations"]] == [("swapped=mlp.gate,mlp.up", "all layers")]
    assert r["measures"]["max_abs_dlogit"] < 3
    low = save(tmp_path / "low", made.LLAMA, {n: w.bfloat16().float() for n, w in t.items()})
    r = verdict(cli("verify", low, "--reference", right, "--accept", "weights=bf16", "--json"), 0, "explained")
    assert [(e["edit"], e["scope"]) for e in r["explanations"]] == [("weights=bf16", "all layers")]


def test_a_missing_tensor_is_not_made_up(cli: Callable[..., Any], good: Path, tmp_path: Path) -> None:
    t = base.llama()
    gone = "model.layers.1.mlp.down_proj.weight"
    port = save(tmp_path / "port", made.LLAMA, {n: w for n, w in t.items() if n != gone})
    for args in ((port, "--reference", good), (good, "--candidate", port), (good, "--reference", port), (port,)):
        got = cli("verify", *args)
        assert (got.code, got.out) == (3, "")
        assert got.err.startswith("error[weights-missing]: ")
        assert gone in got.err
        assert got.err == cli("verify", *args).err
    prefixed = save(tmp_path / "prefixed", made.LLAMA, {
        f"transformer.{n}" if n.startswith("model.") else n: w for n, w in t.items()})
    got = cli("verify", prefixed, "--reference", good, "--tokens", base.IDS)
    assert got.code == 0 or (got.code == 3 and "transformer" in got.err)
