"""`llamactl kv-cache`: bytes of real models, and every definition of the cache against arithmetic written out here."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from typing import Any

import pytest

GIB = 1 << 30
LLAMA = 2 * 32 * 8 * 128  # elements per token of Llama 3 8B: K and V of 32 layers, 8 heads of 128
GEMMA = 2 * 21 * 8 * 256  # of the 21 sliding layers of Gemma 2 9B, and of its 21 full ones


def up(n: int, step: int) -> int:
    """n rounded up to a multiple of step."""
    return (n + step - 1) // step * step


def cost(cli: Any, *args: str) -> dict[str, Any]:
    model: dict[str, Any] = cli("kv-cache", *args, "--json").model
    return model


def byte(cli: Any, *args: str) -> int:
    """kv_cache_bytes of the only combination asked for."""
    (at,) = cost(cli, *args)["at"]
    return int(at["kv_cache_bytes"])


def elements(model: dict[str, Any]) -> int:
    return int(model["elements_per_token_full"] + model["elements_per_token_windowed"])


# ---- real models


@pytest.mark.parametrize(("name", "kept", "full_heads"), [
    ("gpt2", 18_432, 18_432), ("smollm2-135m", 11_520, 34_560), ("llama-3-8b", 65_536, 262_144),
    ("falcon-40b", 61_440, 983_040), ("deepseek-v3", 35_136, 2_498_560), ("mistral-7b-v0.1", 65_536, 262_144),
    ("gemma-2-9b", 172_032, 344_064),
])
def test_elements_per_token(cli: Any, name: str, kept: int, full_heads: int) -> None:
    model = cost(cli, name, "--ctx", "1")
    assert elements(model) == kept
    assert sum(g["elements_per_token"] for g in model["groups"]) == kept
    assert model["full_heads_ratio"] == pytest.approx(full_heads / kept)
    assert model["at"][0]["full_heads_bytes"] * kept == model["at"][0]["kv_cache_bytes"] * full_heads


@pytest.mark.parametrize(("args", "wanted"), [
    ("llama-3-8b --ctx 131072", 17_179_869_184), ("llama-3-8b --ctx 131072 --dtype q8_0", 9_126_805_504),
    ("llama-3-8b --ctx 131072 --dtype q4_0", 4_831_838_208), ("llama-3-8b --ctx 8192 --dtype fp16", GIB),
    ("llama-3-8b --ctx 8192 --dtype fp16 --set n_kv_heads=32", 4 * GIB),
    ("llama-3-8b --ctx 8192 --dtype fp16 --set n_kv_heads=1", GIB // 8),
    ("llama-3-8b --ctx 131072 --set n_kv_heads=32", 68_719_476_736),
    ("gemma-2-9b --ctx 8192 --dtype bf16", 2_113_929_216),
    ("gemma-2-9b --ctx 8192 --dtype bf16 --set window=none", 2_818_572_288),
    ("gpt-oss-120b --ctx 131072", 4_836_556_800), ("deepseek-v3 --ctx 1", 70_272),
    ("deepseek-v3 --ctx 1 --expanded", 4_997_120), ("mistral-7b-v0.1 --ctx 32768", 536_870_912),
    ("falcon-40b --ctx 1", 61_440 * 2), ("falcon-40b --ctx 1 --engine hf", 983_040 * 2),
    ("smollm2-135m --ctx 1 --dtype int8", 11_520), ("smollm2-135m --ctx 1 --dtype int8 --set n_kv_heads=9", 34_560),
])
def test_bytes_of_a_real_model(cli: Any, args: str, wanted: int) -> None:
    assert byte(cli, *args.split()) == wanted
    assert cli("kv-cache", *args.split(), "-q").out == f"{wanted}\n"
    assert f"{wanted:,} B" in cli("kv-cache", *args.split()).out


def test_full_heads_stand_beside(cli: Any) -> None:
    (at,) = cost(cli, "llama-3-8b", "--ctx", "131072")["at"]
    assert at["full_heads_bytes"] == 68_719_476_736
    text = cli("kv-cache", "llama-3-8b", "--ctx", "131072").out
    assert "68,719,476,736 B (68.72 GB, 64.00 GiB), 4x as much" in text
    assert "16,060,522,496 B (16.06 GB, 14.96 GiB) in bfloat16" in text


def test_groups_tell_what_is_cached_where(cli: Any) -> None:
    sliding, full = cost(cli, "gpt-oss-120b", "--ctx", "131072")["groups"]
    assert (sliding["kind"], sliding["layers"], sliding["window"]) == ("sliding", 18, 128)
    assert (full["kind"], full["layers"], full["window"]) == ("full", 18, None)
    assert sliding["layer_ranges"] == [[i, i] for i in range(0, 36, 2)]
    assert sliding["share"] + full["share"] == pytest.approx(1)
    assert full["share"] == pytest.approx(131_072 / (131_072 + 128))
    (latent,) = cost(cli, "deepseek-v3", "--ctx", "1")["groups"]
    assert (latent["kind"], latent["heads"], latent["k_dim"], latent["v_dim"]) == ("latent", 1, 512 + 64, 0)
    kinds = {g["kind"]: g["window"] for g in cost(cli, "llama-4-scout", "--ctx", "16384")["groups"]}
    assert kinds == {"chunked": 8192, "full": None}


def test_a_cache_grows_evenly_or_says_that_it_does_not(cli: Any) -> None:
    assert cost(cli, "llama-3-8b", "--ctx", "8192")["bytes_per_token"] == 131_072
    assert cost(cli, "gemma-2-9b", "--ctx", "4096", "--dtype", "bf16")["bytes_per_token"] == 4 * GEMMA
    model = cost(cli, "gemma-2-9b", "--ctx", "8192", "--dtype", "bf16")
    assert model["bytes_per_token"] is None
    assert (model["elements_per_token_full"], model["elements_per_token_windowed"]) == (GEMMA, GEMMA)
    assert "growth is not even" in cli("kv-cache", "gemma-2-9b", "--ctx", "8192").out


def test_nothing_recurrent_is_cached_by_attention_alone(cli: Any) -> None:
    model = cost(cli, "llama-3-8b", "--ctx", "8192")
    assert model["state_elements"] == 0
    assert [at["state_bytes"] for at in model["at"]] == [0]


# ---- contexts, batches, dtypes


@pytest.mark.parametrize(("words", "wanted"), [
    (["8192"], [8192]), (["8_192"], [8192]), (["128k"], [131_072]), (["128K"], [131_072]),
    (["128ki"], [131_072]), (["1m"], [1 << 20]), (["131,072"], [131_072]), (["1k..8k"], [1024, 2048, 4096, 8192]),
    (["1k..5k"], [1024, 2048, 4096, 5120]), (["1k,4k"], [1024, 4096]), (["1k", "--ctx", "4k"], [1024, 4096]),
    (["1024,2048,1024"], [1024, 2048]), (["1"], [1]), (["2k..2k"], [2048]), (["1k..2k,8k"], [1024, 2048, 8192]),
])
def test_spellings_of_a_context(cli: Any, words: list[str], wanted: list[int]) -> None:
    got = cli("kv-cache", "llama-3-8b", "--ctx", *words, "--json")
    assert [at["ctx"] for at in got.model["at"]] == wanted
    assert [at["kv_cache_bytes"] for at in got.model["at"]] == [2 * LLAMA * n for n in wanted]
    assert got.json()["inputs"]["ctx"] == wanted


@pytest.mark.parametrize(("name", "ctx"), [("llama-3-8b", 8192), ("llama-3.1-8b", 131_072), ("gpt2", 1024),
                                           ("gpt-oss-120b", 131_072), ("deepseek-v3", 163_840)])
def test_without_a_context_it_is_the_models_own(cli: Any, name: str, ctx: int) -> None:
    model = cost(cli, name)
    assert [at["ctx"] for at in model["at"]] == [ctx]
    assert model["usable_context"] == ctx
    assert cli("kv-cache", name, "--json").json()["inputs"]["ctx"] is None


def test_past_the_models_context_is_a_warning(cli: Any) -> None:
    assert cli("kv-cache", "llama-3-8b", "--ctx", "8192", "--json").json()["warnings"] == []
    got = cli("kv-cache", "llama-3-8b", "--ctx", "1k,8193", "--json")
    assert got.code == 0
    (said,) = got.json()["warnings"]
    assert said["code"] == "context-exceeded"
    assert "8,193 tokens is past the 8,192 positions" in said["message"]
    assert got.model["at"][1]["kv_cache_bytes"] == 8193 * 2 * LLAMA


@pytest.mark.parametrize(("words", "wanted"), [(["4"], [4]), (["1,8"], [1, 8]), (["2", "--batch", "3"], [2, 3])])
def test_a_batch_multiplies(cli: Any, words: list[str], wanted: list[int]) -> None:
    model = cost(cli, "llama-3-8b", "--ctx", "8192", "--batch", *words)
    assert [(at["batch"], at["kv_cache_bytes"]) for at in model["at"]] == [(n, n * GIB) for n in wanted]
    assert model["bytes_per_token"] == 131_072


BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int8": 1, "q8_0": 34 / 32, "q5_1": 24 / 32, "q5_0": 22 / 32,
         "q4_1": 20 / 32, "q4_0": 18 / 32}


@pytest.mark.parametrize("dtype", BYTES)
def test_every_cache_dtype(cli: Any, dtype: str) -> None:
    """A ggml block of 32 elements carries its own scale, so that 4 bits are 4.5."""
    assert byte(cli, "llama-3-8b", "--ctx", "8192", "--dtype", dtype) == 8192 * LLAMA * BYTES[dtype]


def test_k_and_v_in_different_dtypes(cli: Any) -> None:
    half = 8192 * LLAMA // 2
    for flags, k, v in ((("--k-dtype", "q8_0", "--v-dtype", "q4_0"), "q8_0", "q4_0"),
                        (("--k-dtype", "q8_0"), "q8_0", "bf16"), (("--v-dtype", "fp8"), "bf16", "fp8"),
                        (("--dtype", "q4_0", "--k-dtype", "fp16"), "fp16", "q4_0")):
        model = cost(cli, "llama-3-8b", "--ctx", "8192", *flags)
        assert (model["k_dtype"], model["v_dtype"]) == (k, v)
        assert model["at"][0]["kv_cache_bytes"] == half * BYTES[k] + half * BYTES[v]
    assert "K q8_0, V q4_0" in cli("kv-cache", "llama-3-8b", "--k-dtype", "q8_0", "--v-dtype", "q4_0").out


def test_rows_that_do_not_fill_a_block_are_told(cli: Any, folder: Any, tiny: Any) -> None:
    got = cli("kv-cache", folder({**tiny.config, "head_dim": 20}), "--ctx", "8", "--dtype", "q8_0", "--json")
    assert "block-remainder" in {w["code"] for w in got.json()["warnings"]}
    assert got.model["at"][0]["kv_cache_bytes"] == 8 * 2 * 2 * 34 * up(2 * 20, 32) // 32


def test_a_sweep_is_every_combination(cli: Any) -> None:
    model = cost(cli, "llama-3-8b", "--sweep", "ctx=1k..4k,batch=1,8,dtype=bf16,q8_0")
    wanted = {(c, b, d): c * b * LLAMA * BYTES[d] for c in (1024, 2048, 4096) for b in (1, 8) for d in ("bf16", "q8_0")}
    assert {(at["ctx"], at["batch"], at["k_dtype"]): at["kv_cache_bytes"] for at in model["at"]} == wanted
    assert len(model["at"]) == 12
    assert [at["ctx"] for at in cost(cli, "llama-3-8b", "--sweep", "ctx=2k", "--ctx", "1k")["at"]] == [1024, 2048]
    text = cli("kv-cache", "llama-3-8b", "--sweep", "ctx=1k..4k,batch=1,8,dtype=bf16,q8_0").out
    assert re.search(r"^ +4,096 +8 +q8_0 +2,281,701,376 ", text, re.M)


@pytest.mark.parametrize(("tp", "per_token"), [(1, 131_072), (4, 32_768), (8, 16_384), (16, 16_384), (32, 16_384)])
def test_devices_share_heads_but_never_split_one(cli: Any, tp: int, per_token: int) -> None:
    model = cost(cli, "llama-3-8b", "--ctx", "8192", "--tp", str(tp))
    assert model["bytes_per_token"] == per_token == 2 * 32 * max(1, 8 // tp) * 128 * 2
    assert model["at"][0]["kv_cache_bytes"] == 8192 * per_token
    assert model["at"][0]["full_heads_bytes"] == 8192 * 2 * 32 * (32 // tp) * 128 * 2
    if tp > 1:
        assert f"on each of {tp} devices" in cli("kv-cache", "llama-3-8b", "--tp", str(tp)).out


def test_a_latent_is_whole_on_every_device(cli: Any) -> None:
    assert cost(cli, "deepseek-v3", "--ctx", "8", "--tp", "8")["bytes_per_token"] == 70_272
    assert byte(cli, "deepseek-v3", "--ctx", "8", "--tp", "8", "--expanded") == 8 * 4_997_120 // 8


# ---- engines: the same cache, defined four ways


@pytest.mark.parametrize(("ctx", "batch"), [(8192, 1), (8192, 3), (4096, 1), (4097, 1), (1000, 1), (1, 1)])
def test_the_architectures_own_definition(cli: Any, ctx: int, batch: int) -> None:
    wanted = batch * 2 * GEMMA * (ctx + min(ctx, 4096))
    args = ("gemma-2-9b", "--dtype", "bf16", "--ctx", str(ctx), "--batch", str(batch))
    assert byte(cli, *args) == byte(cli, *args, "--engine", "arch") == wanted


@pytest.mark.parametrize(("ctx", "batch"), [(8192, 1), (8192, 3), (4096, 1), (4095, 1), (1000, 2)])
def test_transformers_keeps_one_token_less_than_the_window(cli: Any, ctx: int, batch: int) -> None:
    wanted = batch * 2 * GEMMA * (ctx + min(ctx, 4096 - 1))
    got = byte(cli, "gemma-2-9b", "--dtype", "bf16", "--ctx", str(ctx), "--batch", str(batch), "--engine", "hf")
    assert got == wanted


@pytest.mark.parametrize(("ctx", "batch"), [(8192, 1), (8192, 3), (8191, 1), (1000, 1), (1, 2), (16, 1)])
@pytest.mark.parametrize("step", [2048, 512, 8192])
def test_vllm_counts_pages_of_sixteen(cli: Any, ctx: int, batch: int, step: int) -> None:
    """A sliding layer holds window - 1 + the tokens of one step, and one page more for a window that starts inside."""
    sliding = up(min(4096 - 1 + step, ctx), 16) + 16
    wanted = batch * 2 * GEMMA * (up(ctx, 16) + sliding)
    flags = () if step == 2048 else ("--engine-batch", str(step))
    got = byte(cli, "gemma-2-9b", "--dtype", "bf16", "--ctx", str(ctx), "--batch", str(batch), "--engine", "vllm",
               *flags)
    assert got == wanted


@pytest.mark.parametrize(("ctx", "batch"), [(8192, 1), (8192, 3), (8191, 1), (1000, 1), (1, 2), (5000, 1)])
@pytest.mark.parametrize("step", [512, 256, 2048])
def test_llama_cpp_pads_one_pool_to_256(cli: Any, ctx: int, batch: int, step: int) -> None:
    pool = up(ctx * batch, 256)
    wanted = 2 * GEMMA * (pool + up(min(pool, 4096 * batch + step), 256))
    flags = () if step == 512 else ("--engine-batch", str(step))
    got = cost(cli, "gemma-2-9b", "--ctx", str(ctx), "--batch", str(batch), "--engine", "llama.cpp", *flags)
    assert got["at"][0]["kv_cache_bytes"] == wanted
    assert (got["k_dtype"], got["v_dtype"]) == ("fp16", "fp16")


def test_llama_cpp_keeps_all_of_a_family_that_slides_everywhere(cli: Any) -> None:
    assert byte(cli, "mistral-7b-v0.1", "--ctx", "32768", "--engine", "llama.cpp") == 32_768 * 2 * 32 * 8 * 128 * 2


def test_a_chunk_is_a_window_that_does_not_slide(cli: Any) -> None:
    """Llama 4 Scout: 36 of 48 layers see their chunk of 8,192; 8 KV heads of 128."""
    row = 2 * 8 * 128 * 2
    for engine, chunked in (("arch", 8192), ("vllm", up(8192 + 2048, 16))):
        got = byte(cli, "llama-4-scout", "--ctx", "131072", "--engine", engine)
        assert got == row * (12 * 131_072 + 36 * chunked)


@pytest.mark.parametrize(("engine", "says"), [("arch", "min(ctx, window)"), ("hf", "window - 1"),
                                              ("vllm", "pages of 16"), ("llama.cpp", "256 cells")])
def test_an_engine_says_its_definition(cli: Any, engine: str, says: str) -> None:
    model = cost(cli, "gemma-2-9b", "--ctx", "8192", "--engine", engine)
    assert model["engine"] == engine
    assert says in model["definition"]
    assert f"counted as         {engine}: {model['definition']}" in cli("kv-cache", "gemma-2-9b", "--ctx", "8192",
                                                                        "--engine", engine).out


@pytest.mark.parametrize(("engine", "has", "lacks"), [
    ("hf", "fp32", "q8_0"), ("hf", "bf16", "fp8"), ("vllm", "fp8", "q4_0"), ("vllm", "int8", "q8_0"),
    ("llama.cpp", "q4_0", "fp8"), ("llama.cpp", "bf16", "int8"), ("arch", "q5_1", "int4"),
])
def test_an_engine_has_its_own_dtypes(cli: Any, engine: str, has: str, lacks: str) -> None:
    assert cli("kv-cache", "llama-3-8b", "--engine", engine, "--dtype", has).code == 0
    for flag in ("--dtype", "--k-dtype", "--v-dtype"):
        got = cli("kv-cache", "llama-3-8b", "--engine", engine, flag, lacks)
        assert (got.code, got.out) == (2, "")
        assert f"{lacks} is not a cache dtype of engine {engine}" in got.err
        assert has in got.err


# ---- edits


@pytest.mark.parametrize(("edit", "per_token"), [
    ("n_kv_heads=1", 2 * 32 * 1 * 128), ("kv_heads=32", 2 * 32 * 32 * 128), ("n_layers=16", 2 * 16 * 8 * 128),
    ("n_heads=16", LLAMA), ("ffn=1", LLAMA), ("vocab=7", LLAMA), ("tie", LLAMA), ("no-gate", LLAMA), ("gelu", LLAMA),
    ("positions=none", LLAMA), ("layernorm", LLAMA), ("rope_theta=10000", LLAMA),
])
def test_an_edit_changes_the_cache_or_does_not(cli: Any, edit: str, per_token: int) -> None:
    assert byte(cli, "llama-3-8b", "--ctx", "8192", "--set", edit) == 8192 * 2 * per_token


def test_a_window_cuts_the_cache(cli: Any) -> None:
    assert byte(cli, "llama-3-8b", "--ctx", "8192", "--set", "window=1024") == 1024 * 2 * LLAMA
    assert byte(cli, "mistral-7b-v0.1", "--ctx", "32768", "--set", "window=none") == 32_768 * 2 * LLAMA


# ---- views


def test_several_models_stand_under_each_other(cli: Any) -> None:
    names = ("llama-3-8b", "gemma-2-9b", "deepseek-v3")
    text = cli("kv-cache", *names, "--ctx", "8k").out
    assert re.findall(r"^(\S+) \(family", text, re.M) == list(names)
    models = cli("kv-cache", *names, "--ctx", "8k", "--json").models
    assert [m["id"] for m in models] == list(names)
    assert cli("kv-cache", *names, "--ctx", "8k", "-q").out.split() == [str(m["at"][0]["kv_cache_bytes"])
                                                                        for m in models]


def test_csv_holds_raw_integers(cli: Any) -> None:
    text = cli("kv-cache", "llama-3-8b", "gpt2", "--sweep", "ctx=512,1024,batch=1,2", "--format", "csv").out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == ["model", "ctx", "batch", "k_dtype", "v_dtype", "engine", "tp", "kv_cache_bytes",
                             "state_bytes", "full_heads_bytes", "weights_bytes"]
    assert len(rows) == 8
    for r in rows:
        per_token = 2 * LLAMA if r["model"] == "llama-3-8b" else 4 * 18_432
        assert int(r["kv_cache_bytes"]) == per_token * int(r["ctx"]) * int(r["batch"])


def test_markdown_is_a_table(cli: Any) -> None:
    text = cli("kv-cache", "gemma-2-9b", "--ctx", "1k..8k", "--dtype", "bf16", "--format", "md").out
    assert "| context | cache, bytes |  | full heads, bytes |\n| ---: | ---: | --- | ---: |\n" in text
    assert "| 8,192 | 2,113,929,216 | 2.11 GB, 1.97 GiB | 4,227,858,432 |" in text


def test_verbose_writes_the_product_out(cli: Any) -> None:
    text = cli("kv-cache", "llama-3-8b", "--ctx", "8192", "-v").out
    assert "32 layers x 8 heads x (128 + 128) = 65,536 elements = 131,072 B per token" in text
    assert "1 x 8,192 tokens: 1,073,741,824 B = 1,073,741,824 B" in text


def test_a_chart_only_for_a_terminal(terminal: Any, cli: Any) -> None:
    args = ("kv-cache", "llama-3-8b", "--ctx", "1k..8k")
    assert re.search(r"^ +8,192 +#+ +1.07 GB$", terminal(*args).out.replace(" \n", "\n"), re.M)
    assert "#" not in cli(*args).out


# ---- the Python API


def test_the_api_gives_what_the_command_prints(cli: Any) -> None:
    from llamactl import kv_cache, load

    report = kv_cache(load("gemma-2-9b", edits=["kv_heads=4"]), [1024, 8192], batch=[1, 2], dtype=["bf16", "q8_0"],
                      engine="llama.cpp", step=256, tp=2)
    printed = cost(cli, "gemma-2-9b", "--set", "kv_heads=4", "--sweep", "ctx=1k,8k,batch=1,2,dtype=bf16,q8_0",
                   "--engine", "llama.cpp", "--engine-batch", "256", "--tp", "2")
    said = json.loads(json.dumps(report.to_dict()))
    assert said.pop("notes") == []
    assert printed.pop("source")["source"] == "preset"
    assert printed == said
    assert kv_cache("meta-llama/Meta-Llama-3-8B", ctx=131_072).at[0].kv_cache_bytes == 17_179_869_184
    assert kv_cache("deepseek-v3", 1, expanded=True).at[0].kv_cache_bytes == 4_997_120


def test_reports_are_frozen_and_show_themselves() -> None:
    from llamactl import kv_cache

    report = kv_cache("gemma-2-9b", [1024, 8192], dtype="bf16")
    for thing, field in ((report, "engine"), (report.at[0], "ctx"), (report.groups[0], "layers")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 1)
    text = report._repr_html_()
    assert "2,113,929,216" in text
    assert text.count("<table>") == text.count("</table>") == 3
