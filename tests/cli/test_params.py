"""`llamactl params`: exact counts of real models, components that add up, and every edit against a formula by hand."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# What the makers' own checkpoints hold (headers or an index), each number established by two ways of counting.
TOTALS = {
    "gpt2": 124_439_808, "smollm2-135m": 134_515_008, "llama-2-7b": 6_738_415_616, "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800, "mistral-7b-v0.1": 7_241_732_096, "gemma-2-9b": 9_241_705_984,
    "mixtral-8x7b": 46_702_792_704, "qwen3-30b-a3b": 30_532_122_624, "gpt-oss-20b": 20_914_757_184,
    "deepseek-v3": 671_026_404_352,
}
ACTIVE = {  # all, minus the input embedding, minus embedding and head
    "mixtral-8x7b": (12_879_925_248, 12_748_853_248, 12_617_781_248),
    "qwen3-30b-a3b": (3_353_032_704, 3_041_867_776, 2_730_702_848),
    "gpt-oss-20b": (4_187_440_704, 3_608_307_264, 3_029_173_824),
    "deepseek-v3": (37_552_282_624, 36_625_603_584, 35_698_924_544),
}
OUTER = ("token_embedding", "position_embedding", "norms", "state_space", "lm_head", "vision", "projector", "other")


@pytest.fixture(scope="module")
def presets() -> list[str]:
    from llamactl.source import presets as bundled

    return list(bundled.names())


@pytest.mark.parametrize("name", TOTALS)
def test_the_total_of_a_real_model(cli: Any, name: str) -> None:
    model = cli("params", name, "--json").model
    assert model["total"] == TOTALS[name]
    assert cli("params", name, "-q").out == f"{TOTALS[name]}\n"
    assert f"{TOTALS[name]:,}" in cli("params", name).out


def test_every_published_total_is_met(cli: Any, presets: list[str]) -> None:
    shown = cli("presets", "--json").models
    assert [m["id"] for m in shown] == presets
    published = {m["id"]: m["published"]["total"] for m in shown if "total" in m["published"]}
    assert len(published) > 40
    assert {m["id"]: m["total"] for m in shown if m["id"] in published} == published


def test_the_parts_of_gpt2(cli: Any) -> None:
    c = cli("params", "gpt2", "--json").model["components"]
    assert c["token_embedding"] == 50_257 * 768
    assert c["position_embedding"] == 1_024 * 768
    assert c["attention"]["total"] == 28_348_416
    assert c["feed_forward"]["total"] == 56_669_184
    assert c["feed_forward"]["gate"] == 0
    assert c["norms"] == 38_400
    assert c["lm_head"] == 0


def test_the_feed_forward_share(cli: Any) -> None:
    model = cli("params", "llama-3-8b", "--json").model
    (group,) = model["layer_groups"]
    assert (group["params"], group["feed_forward"]) == (218_112_000, 176_160_768)
    assert model["ffn_share_blocks"] == pytest.approx(176_160_768 / 218_112_000, rel=1e-12)
    assert model["ffn_share_model"] == pytest.approx(32 * 176_160_768 / 8_030_261_248, rel=1e-12)
    assert "80.8% of the blocks" in cli("params", "llama-3-8b").out
    assert cli("params", "smollm2-135m", "--json").model["ffn_share_blocks"] == pytest.approx(0.75, abs=5e-4)
    assert cli("params", "llama-2-7b", "--json").model["components"]["feed_forward"]["total"] == 4_328_521_728
    assert cli("params", "llama-2-7b", "--json").model["ffn_share_blocks"] == pytest.approx(2 / 3, abs=0.003)
    full_heads = cli("params", "llama-3.1-8b", "--set", "n_kv_heads=32", "--json").model
    assert full_heads["ffn_share_blocks"] == pytest.approx(0.724, abs=5e-4)
    qwen = cli("params", "qwen3-30b-a3b", "--json").model
    assert qwen["components"]["feed_forward"]["routed_experts"] / qwen["total"] == pytest.approx(0.95, abs=0.001)


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_by_three_definitions(cli: Any, name: str) -> None:
    active = cli("params", name, "--json").model["active"]
    assert tuple(active.values()) == ACTIVE[name]
    assert list(active) == ["all", "minus_input_embedding", "minus_embedding_and_head"]
    text = cli("params", name).out
    for n, words in zip(ACTIVE[name], ("with everything", "without the input embedding", "without embedding and head"),
                        strict=True):
        assert f"{n:,} {words}" in text


def test_a_tied_head_works_though_it_is_the_input_embedding(cli: Any) -> None:
    """Tied, Mixtral loses one of its two matrices of 32,000 x 4,096, and the last two counts are the same."""
    active = cli("params", "mixtral-8x7b", "--set", "tie", "--json").model["active"]
    whole = ACTIVE["mixtral-8x7b"][0] - 32_000 * 4096
    assert tuple(active.values()) == (whole, whole - 32_000 * 4096, whole - 32_000 * 4096)


def test_a_dense_model_has_no_active_count(cli: Any) -> None:
    assert cli("params", "llama-3-8b", "--json").model["active"] is None


def test_what_deepseek_v3_stores_beside_its_total(cli: Any) -> None:
    """58 router biases of 256 experts are buffers; the extra prediction layer is not part of the decoder."""
    left_out = {x["what"]: x for x in cli("params", "deepseek-v3", "--json").model["not_counted"]}
    assert left_out["router correction biases"]["params"] == 58 * 256 == 14_848
    (mtp,) = (x for what, x in left_out.items() if "multi-token" in what)
    assert mtp["params"] == 11_610_068_224
    assert all(x["why"] for x in left_out.values())
    assert "11,610,068,224" in cli("params", "deepseek-v3").out


def test_vision_towers_stand_apart(cli: Any) -> None:
    model = cli("params", "gemma-3-4b", "--json").model
    c = model["components"]
    assert c["vision"] > 400_000_000
    assert c["projector"] > 0
    assert model["text_total"] == model["total"] - c["vision"] - c["projector"] == 3_880_263_168
    assert "language model alone  3,880,263,168" in cli("params", "gemma-3-4b").out
    plain = cli("params", "llama-3-8b", "--json").model
    assert plain["text_total"] == plain["total"]


def test_components_and_layers_add_up_for_every_preset(cli: Any, presets: list[str]) -> None:
    for m in cli("params", *presets, "--json").models:
        c = m["components"]
        for part in ("attention", "feed_forward"):
            assert c[part]["total"] == sum(n for k, n in c[part].items() if k != "total"), m["id"]
        assert sum(c[k] for k in OUTER) + c["attention"]["total"] + c["feed_forward"]["total"] == m["total"], m["id"]
        assert set(c) == {*OUTER, "attention", "feed_forward"}
        groups = m["layer_groups"]
        assert sum(g["layers"] for g in groups) == m["layers"]
        assert sum(g["layers"] * g["params"] for g in groups) == m["blocks_total"]
        assert sum(b - a + 1 for g in groups for a, b in g["ranges"]) == m["layers"]
        assert m["ffn_share_blocks"] * m["blocks_total"] == pytest.approx(c["feed_forward"]["total"])
        assert (c["lm_head"] == 0) is m["tied"] or m["id"].startswith("phi")
        if m["active"]:
            assert m["active"]["minus_input_embedding"] == m["active"]["all"] - c["token_embedding"]
            assert m["active"]["minus_embedding_and_head"] == m["active"]["minus_input_embedding"] - c["lm_head"]


@pytest.mark.parametrize(("dtype", "bytes_"), [
    ("fp64", 8), ("fp32", 4), ("float32", 4), ("torch.bfloat16", 2), ("bf16", 2), ("BF16", 2), ("fp16", 2), ("fp8", 1),
    ("int8", 1), ("int4", 0.5), ("nf4", 0.5), ("q8_0", 34 / 32), ("q5_1", 24 / 32), ("q5_0", 22 / 32),
    ("q4_1", 20 / 32), ("q4_0", 18 / 32),
])
def test_weights_in_every_dtype(cli: Any, dtype: str, bytes_: float) -> None:
    model = cli("params", "llama-3-8b", "--dtype", dtype, "--json").model
    assert model["weights_bytes"] == 8_030_261_248 * bytes_
    assert model["dtype_from"] == "asked for"
    assert model["total"] == 8_030_261_248


# ---- views


def test_several_models_stand_in_columns(cli: Any) -> None:
    names = ("gpt2", "llama-3-8b", "mixtral-8x7b")
    text = cli("params", *names).out
    assert text.splitlines()[0].split() == ["component", *names]
    rows = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    assert rows["total"] == ["124,439,808", "8,030,261,248", "46,702,792,704"]
    assert rows["active per token"] == ["-", "-", "12,879,925,248"]
    assert rows["output head"] == ["tied", "untied", "untied"]
    got = cli("params", *names, "--json").json()
    assert got["model"] is None
    assert [m["source"]["id"] for m in got["result"]["models"]] == list(names)


def test_csv_holds_raw_integers_that_add_up(cli: Any) -> None:
    rows = list(csv.DictReader(io.StringIO(cli("params", "mixtral-8x7b", "gpt2", "--format", "csv").out)))
    assert list(rows[0]) == ["model", "component", "params"]
    for name in ("mixtral-8x7b", "gpt2"):
        mine = {r["component"]: int(r["params"]) for r in rows if r["model"] == name}
        parts = ("token_embedding", "position_embedding", "attention", "feed_forward", "norms", "lm_head")
        assert sum(mine.get(p, 0) for p in parts) == mine["total"] == TOTALS[name]
        assert sum(n for k, n in mine.items() if k.startswith("attention.")) == mine["attention"]
    assert {r["component"] for r in rows if r["model"] == "mixtral-8x7b"} >= {
        "feed_forward.router", "feed_forward.routed_experts", "active.all", "weights_bytes"}


def test_markdown_is_a_table(cli: Any) -> None:
    text = cli("params", "llama-3-8b", "--format", "md").out
    assert "| component | parameters | share | in each block |\n| --- | ---: | ---: | ---: |\n" in text
    assert "| total | 8,030,261,248 | 100.0% | 218,112,000 |" in text


def test_by_layer(cli: Any) -> None:
    """Mixtral's layers are alike; DeepSeek-V3 begins with three dense ones."""
    text = cli("params", "deepseek-v3", "--by", "layer").out
    rows = [line.split() for line in text.splitlines() if re.match(r"\d+-\d+ ", line)]
    assert [(r[0], r[1]) for r in rows] == [("0-2", "3"), ("3-60", "58")]
    assert sum(int(r[-1].replace(",", "")) for r in rows) + 2 * 926_679_040 + 7_168 == TOTALS["deepseek-v3"]
    rows = list(csv.DictReader(io.StringIO(cli("params", "gemma-3-1b", "--by", "layer", "--format", "csv").out)))
    assert {r["layers"] for r in rows} == {"0-4, 6-10, 12-16, 18-22, 24-25", "5, 11, 17, 23"}
    assert sum(int(r["number"]) for r in rows) == 26


def test_tree(cli: Any) -> None:
    text = cli("params", "llama-3-8b", "--tree").out
    numbers = {k.strip(): int(v.replace(",", "")) for k, v in re.findall(r"^( *\S.*?)  +([\d,]+)$", text, re.M)}
    assert numbers["llama-3-8b"] == TOTALS["llama-3-8b"]
    assert numbers["blocks (32)"] == 32 * 218_112_000
    inner = numbers["attention"] + numbers["feed-forward"] + numbers["norms"]
    assert inner == numbers["layers 0-31: 32 of"] == 218_112_000
    outer = numbers["token embedding"] + numbers["norms outside the blocks"] + numbers["output head"]
    assert numbers["blocks (32)"] + outer == TOTALS["llama-3-8b"]
    both = cli("params", "llama-3-8b", "gpt2", "--tree").out
    assert "layers 0-31: 32 of" in both
    assert "layers 0-11: 12 of" in both


# ---- references


@pytest.mark.parametrize("ref", ["llama-3-8b", "preset:llama-3-8b", "meta-llama/Meta-Llama-3-8B", "LLAMA-3-8B",
                                 "meta-llama/meta-llama-3-8b", "meta-llama/Meta-Llama-3-8B-Instruct"])
def test_a_bundled_model_answers_under_all_its_names(cli: Any, ref: str) -> None:
    got = cli("params", ref, "--json")
    assert got.model["total"] == TOTALS["llama-3-8b"]
    assert got.json()["model"]["source"] == "preset"
    assert got.json()["model"]["revision"] is None
    assert "source: preset" in cli("params", ref).out


def test_a_model_in_the_local_cache_is_read_without_a_request(run: Any, tmp_path: Path, tiny: Any) -> None:
    commit = "c" * 40
    repo = tmp_path / "hf" / "hub" / "models--acme--tiny"
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit / "config.json").write_text(json.dumps(tiny.config))
    for ref, env in (("acme/tiny", {}), ("hf://acme/tiny", {}), (f"acme/tiny@{commit}", {"HF_HUB_OFFLINE": None})):
        got = run("params", ref, "--json", env=env)
        assert got.model["total"] == tiny.total
        assert got.json()["model"] == {"source": "hub", "id": "acme/tiny", "revision": commit, "path": got.json()[
            "model"]["path"]}
        assert got.err == ""


# ---- edits, each against the formula


def llama(h: int = 4096, f: int = 14_336, v: int = 128_256, layers: int = 32, heads: int = 32, kv: int = 8,
          d: int = 128, *, tied: bool = False, matrices: int = 3, norm: int = 1, positions: int = 0) -> int:
    """A Llama's parameters: norm is 1 for RMSNorm and 2 for LayerNorm, positions the rows of a learned table."""
    block = 2 * h * heads * d + 2 * h * kv * d + matrices * h * f + 2 * norm * h
    return v * h * (1 if tied else 2) + layers * block + norm * h + positions * h


def mixtral(experts: int = 8, top_k: int = 2, f: int = 14_336) -> tuple[int, int]:
    """(total, active) of Mixtral 8x7B: a router row for each expert, three matrices in each."""
    h, layers, v = 4096, 32, 32_000
    rest = 2 * h * h + 2 * h * 1024 + 2 * h + experts * h
    outside = 2 * v * h + h
    return (outside + layers * (rest + experts * 3 * h * f), outside + layers * (rest + top_k * 3 * h * f))


EDITS: list[tuple[str, int]] = [
    ("n_kv_heads=1", llama(kv=1)), ("kv_heads=32", llama(kv=32)), ("num_key_value_heads=4", llama(kv=4)),
    ("kv-heads=16", llama(kv=16)), ("n_heads=16", llama(heads=16)), ("num_attention_heads=64", llama(heads=64)),
    ("ffn=11008", llama(f=11_008)), ("intermediate_size=28,672", llama(f=28_672)), ("d_ff=1", llama(f=1)),
    ("n_layers=1", llama(layers=1)), ("layers=64", llama(layers=64)), ("num_hidden_layers=80", llama(layers=80)),
    ("vocab=32000", llama(v=32_000)), ("vocab_size=50_257", llama(v=50_257)), ("tie", llama(tied=True)),
    ("tie=yes", llama(tied=True)), ("tie_word_embeddings=true", llama(tied=True)), ("untie", llama()),
    ("activation=gelu", llama()), ("gelu", llama()), ("hidden_act=relu", llama()), ("relu", llama()),
    ("no-gate", llama(matrices=2)), ("no_gate", llama(matrices=2)), ("gate=false", llama(matrices=2)),
    ("gate", llama()), ("positions=learned", llama(positions=8192)), ("learned-positions", llama(positions=8192)),
    ("positions=none", llama()), ("no-positions", llama()), ("positions=sinusoidal", llama()),
    ("positions=alibi", llama()), ("positions=rope", llama()), ("norm=layer", llama(norm=2)),
    ("layernorm", llama(norm=2)), ("rmsnorm", llama()), ("window=1024", llama()), ("sliding_window=none", llama()),
    ("rope_theta=10000", llama()), ("theta=1e6", llama()),
]


@pytest.mark.parametrize(("edit", "total"), EDITS, ids=[e for e, _ in EDITS])
def test_an_edit_of_llama_3_8b(cli: Any, edit: str, total: int) -> None:
    got = cli("params", "llama-3-8b", "--set", edit, "--json")
    assert got.model["total"] == total
    assert got.json()["inputs"]["set"] == [edit]
    assert edit in cli("params", "llama-3-8b", "--set", edit).out.splitlines()[0]


@pytest.mark.parametrize(("edit", "total_active"), [
    ("n_experts=16", mixtral(experts=16)), ("num_local_experts=4", mixtral(experts=4)), ("top_k=4", mixtral(top_k=4)),
    ("num_experts_per_tok=8", mixtral(top_k=8)), ("expert_ffn=7168", mixtral(f=7168)),
    ("moe_intermediate_size=2048", mixtral(f=2048)),
])
def test_an_edit_of_mixtral(cli: Any, edit: str, total_active: tuple[int, int]) -> None:
    assert mixtral() == (TOTALS["mixtral-8x7b"], ACTIVE["mixtral-8x7b"][0])
    model = cli("params", "mixtral-8x7b", "--set", edit, "--json").model
    assert (model["total"], model["active"]["all"]) == total_active


@pytest.mark.parametrize(("model", "edits", "total"), [
    ("llama-3-8b", ["tie"], 7_504_924_672),  # a teaching model whose head shares the embedding
    ("smollm2-135m", ["n_kv_heads=9"], 147_786_048), ("smollm2-135m", ["untie"], 134_515_008 + 49_152 * 576),
    ("gpt2", ["positions=rope"], 124_439_808 - 1024 * 768), ("gpt2", ["norm=rms"], 124_439_808 - 38_400 // 2),
    ("gpt2", ["gate"], 124_439_808 + 12 * (768 * 3072 + 3072)), ("gpt2", ["untie"], 124_439_808 + 50_257 * 768),
    ("llama-3-8b", ["ffn=11008", "kv_heads=32", "vocab=32000"], 6_738_415_616), ("llama-3-8b", ["n_layers=80",
     "n_layers=32"], 8_030_261_248),
    ("qwen3-8b", ["kv_heads=32"], 8_190_735_360 + 36 * 2 * 4096 * 24 * 128),
])
def test_edits_of_other_models_and_in_a_row(cli: Any, model: str, edits: list[str], total: int) -> None:
    flags = [word for edit in edits for word in ("--set", edit)]
    assert cli("params", model, *flags, "-q").out == f"{total}\n"


def test_attention_of_eight_small_heads(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder({**tiny.config, "num_key_value_heads": 8, "num_hidden_layers": 1})
    for kv, attention in ((8, 16_384), (1, 9_216)):
        model = cli("params", path, "--set", f"n_kv_heads={kv}", "--json").model
        assert model["components"]["attention"]["total"] == attention


IMPOSSIBLE = [
    ("llama-3-8b", "n_kv_heads=5", "32 heads cannot share 5 KV heads"), ("llama-3-8b", "n_kv_heads=64", "cannot share"),
    ("llama-3-8b", "n_kv_heads=0", "outside 1.."), ("llama-3-8b", "n_heads=12", "12 heads cannot share 8"),
    ("llama-3-8b", "n_kv_heads=1.5", "not an integer"), ("llama-3-8b", "n_experts=8", "has no experts"),
    ("llama-3-8b", "top_k=2", "has no experts"), ("llama-3-8b", "expert_ffn=8", "has no experts"),
    ("llama-3-8b", "tie=maybe", "neither true nor false"), ("llama-3-8b", "activation=silly", "not one of"),
    ("llama-3-8b", "norm=batch", "not one of rms, layer"), ("llama-3-8b", "positions=here", "not one of rope"),
    ("llama-3-8b", "window=0", "outside 1.."), ("llama-3-8b", "rope_theta=fast", "not a number"),
    ("llama-3-8b", "rope_theta=nan", "outside 1.."), ("llama-3-8b", "rope_theta=inf", "outside 1.."),
    ("llama-3-8b", "vocab=10000000000", "outside 1.."), ("llama-3-8b", "n_layers=10001", "outside 1..10,000"),
    ("mixtral-8x7b", "ffn=1024", "set expert_ffn"), ("mixtral-8x7b", "top_k=9", "9 experts per token of 8"),
    ("mixtral-8x7b", "n_experts=1", "2 experts per token of 1"), ("deepseek-v3", "n_kv_heads=8", "latent attention"),
    ("deepseek-v3", "window=1024", "latent attention"), ("gemma-2-9b", "n_layers=64", "a guess"),
    ("gpt2", "rope_theta=10000", "no RoPE"), ("falcon-40b", "positions=learned", "names no context"),
]


@pytest.mark.parametrize(("model", "edit", "why"), IMPOSSIBLE, ids=[f"{m}-{e}" for m, e, _ in IMPOSSIBLE])
def test_an_edit_that_cannot_be_made_is_refused(cli: Any, model: str, edit: str, why: str) -> None:
    for args in (("params", model), ("kv-cache", model, "--ctx", "8")):
        got = cli(*args, "--set", edit)
        assert (got.code, got.out) == (2, "")
        assert got.err.startswith("error[edit]: ")
        assert why in got.err


# ---- weight files


def test_weights_are_compared_by_header(cli: Any, folder: Any, tiny: Any) -> None:
    tensors = tiny.tensors(tiny.config)
    model = cli("params", folder(tensors=tensors), "--weights", "--json").model
    assert model["files"] == {
        "files": 1, "tensors": len(tensors), "elements": tiny.total, "weights_bytes": 4 * tiny.total,
        "bytes_by_dtype": {"F32": 4 * tiny.total}, "agrees": True, "missing": [], "unexpected": [], "reshaped": []}
    assert model["total"] == tiny.total
    text = cli("params", folder(), "--weights").out
    assert re.search(r"^agrees with the config +yes, name by name$", text, re.M)
    assert f"{4 * tiny.total:,} B" in text


def test_weights_that_differ_are_named(cli: Any, folder: Any, tiny: Any) -> None:
    tensors = tiny.tensors(tiny.config)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = ("F32", (102, 64))
    tensors["extra.weight"] = ("F32", (3,))
    got = cli("params", folder(tensors=tensors), "--weights", "--json")
    files = got.model["files"]
    assert files["agrees"] is False
    assert files["missing"] == ["model.norm.weight"]
    assert files["unexpected"] == ["extra.weight"]
    assert files["reshaped"] == ["lm_head.weight: [102, 64] stored, [101, 64] by the config"]
    assert {w["code"] for w in got.json()["warnings"]} == {"weights-missing", "weights-unexpected", "weights-shape"}
    said = cli("params", folder(tensors=tensors), "--weights").err.splitlines()
    assert len(said) == 3
    assert all(line.startswith("warning[weights-") for line in said)


def test_weights_are_read_only_when_asked(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder()
    (path / "model.safetensors").write_bytes(b"no such thing")
    assert cli("params", path, "-q").out == f"{tiny.total}\n"
    assert cli("params", path, "--weights").code == 3


# ---- the Python API


def test_the_api_gives_what_the_command_prints(cli: Any) -> None:
    from llamactl import load, params

    for name, edits, flags in (("mixtral-8x7b", (), ()), ("llama-3-8b", ("kv_heads=1", "tie"),
                                                          ("--set", "kv_heads=1", "--set", "tie"))):
        report = params(load(name, edits=edits))
        printed = cli("params", name, *flags, "--json").model
        said = json.loads(json.dumps(report.to_dict()))
        assert said.pop("notes") == []
        assert printed.pop("source")["source"] == "preset"
        assert printed == said
    assert params("gpt2", dtype="fp16").weights_bytes == 2 * TOTALS["gpt2"]
    assert params("gpt2").total == TOTALS["gpt2"]


def test_reports_are_frozen() -> None:
    from llamactl import load, params

    loaded = load("gpt2")
    report = params(loaded)
    for thing, field in ((report, "total"), (report.components, "norms"), (loaded, "model"), (loaded.model, "hidden")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 1)


def test_a_report_shows_itself_in_a_notebook() -> None:
    from llamactl import params

    text = params("llama-3-8b")._repr_html_()
    assert text.startswith('<div class="llamactl">')
    assert text.endswith("</div>")
    assert "8,030,261,248" in text
    assert text.count("<table>") == text.count("</table>") == 2


def test_errors_of_the_api_have_a_code(tmp_path: Path) -> None:
    from llamactl import LlamactlError, load
    from llamactl.errors import NotAvailable, UsageError

    with pytest.raises(NotAvailable) as caught:
        load(str(tmp_path / "none"))
    assert (caught.value.code, caught.value.exit_code) == ("not-found", 4)
    with pytest.raises(UsageError):
        load("gpt2", edits=["nothing"])
    assert issubclass(NotAvailable, LlamactlError)


def test_the_public_names() -> None:
    import llamactl

    assert llamactl.__all__ == sorted(llamactl.__all__)
    assert set(llamactl.__all__) >= {"LlamactlError", "__version__", "kv_cache", "load", "params"}
    assert all(getattr(llamactl, name) is not None for name in llamactl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        llamactl.nothing  # noqa: B018


def test_importing_the_package_imports_nothing_else(tmp_path: Path, environment: Any) -> None:
    code = "import sys, llamactl; print(*(m for m in sys.modules if m.split('.')[0] not in sys.stdlib_module_names))"
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment(tmp_path), capture_output=True, text=True,
                          check=True, timeout=180)
    assert done.stdout.split() == ["__main__", "llamactl"]
