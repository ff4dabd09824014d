"""Every failure: its exit code, its word, one `error[...]` line with what is wrong and at most one `help:` line."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

USAGE, REFUSED, MISSING = 2, 3, 4
EXAMPLE = "try: llamactl params meta-llama/Meta-Llama-3-8B"


def check(got: Any, code: int, word: str, *parts: str) -> None:
    """The form that every failure has, and the parts that this one has."""
    assert (got.code, got.out) == (code, "")
    lines = got.err.splitlines()
    assert re.fullmatch(rf"error\[{word}\]: \S.*", lines[0]), got.err
    assert len(lines) in (1, 2)
    assert all(line.startswith("help: ") for line in lines[1:])
    assert "Traceback" not in got.err
    for part in parts:
        assert part in got.err


# args -> exit code, code word, parts of the text
WRONG: list[tuple[str, int, str, tuple[str, ...]]] = [
    ("", USAGE, "usage", ("--help",)),
    ("parms gpt2", USAGE, "usage", ("no such command 'parms'", "help: did you mean 'params'?")),
    ("kv_cache gpt2", USAGE, "usage", ("did you mean 'kv-cache'?",)),
    ("xyzzy", USAGE, "usage", ("no such command 'xyzzy'", "--help")),
    ("params gpt2 --jsn", USAGE, "usage", ("no such option --jsn", "did you mean --json?")),
    ("kv-cache gpt2 --ctxs 5", USAGE, "usage", ("no such option --ctxs", "did you mean --ctx?")),
    ("kv-cache gpt2 --bach 5", USAGE, "usage", ("did you mean --batch?",)),
    ("presets --formt csv", USAGE, "usage", ("did you mean --format?",)),
    ("--versin", USAGE, "usage", ("did you mean --version?",)),
    ("params gpt2 --qqqqqq", USAGE, "usage", ("no such option", "llamactl params --help")),
    ("params gpt2 --dtype", USAGE, "usage", ("--dtype", "requires an argument", "--help'")),
    ("params gpt2 --format jsn", USAGE, "usage", ("'jsn' is not one of table, plain, json, csv, md", "'json'?")),
    ("params gpt2 --color sometime", USAGE, "usage", ("--color 'sometime'", "auto, always, never")),
    ("params gpt2 --by laye", USAGE, "usage", ("'laye'", "component", "layer")),
    ("params gpt2 --dtype bf15", USAGE, "dtype", ("'bf15' is not a known dtype", "did you mean 'bf16'?")),
    ("params gpt2 --dtype ???", USAGE, "dtype", ("known: ", "q4_0")),
    ("kv-cache gpt2 --dtype q8_1", USAGE, "dtype", ("'q8_1'", "did you mean 'q8_0'?")),
    ("kv-cache gpt2 --k-dtype fp17", USAGE, "dtype", ("'fp17'", "did you mean 'fp1")),
    ("kv-cache gpt2 --v-dtype fp17", USAGE, "dtype", ("'fp17'", "did you mean 'fp1")),
    ("kv-cache gpt2 --engine vlm", USAGE, "engine", ("'vlm' is not a known engine", "did you mean 'vllm'?")),
    ("kv-cache gpt2 --engine zzz", USAGE, "engine", ("known: arch, hf, vllm, llama.cpp",)),
    ("kv-cache gpt2 --engine vllm --dtype q8_0", USAGE, "dtype", ("q8_0 is not a cache dtype of engine vllm", "fp8")),
    ("kv-cache gpt2 --engine hf --dtype fp8", USAGE, "dtype", ("fp8 is not a cache dtype of engine hf", "bf16")),
    ("kv-cache gpt2 --engine llama.cpp --dtype int8", USAGE, "dtype", ("engine llama.cpp", "q8_0")),
    ("kv-cache gpt2 --ctx many", USAGE, "usage", ("--ctx 'many' is not a number of tokens", "128k")),
    ("kv-cache gpt2 --ctx 0", USAGE, "usage", ("--ctx 0", "1..2^40")),
    ("kv-cache gpt2 --ctx -5", USAGE, "usage", ("-5",)),
    ("kv-cache gpt2 --ctx 4096g", USAGE, "usage", ("1..2^40",)),
    ("kv-cache gpt2 --ctx 8k..1k", USAGE, "usage", ("8k..1k", "empty")),
    ("kv-cache gpt2 --ctx 1.5k", USAGE, "usage", ("1.5k",)),
    ("kv-cache gpt2 --batch two", USAGE, "usage", ("--batch 'two'",)),
    ("kv-cache gpt2 --tp 0", USAGE, "usage", ("--tp", "1<=x<=4096")),
    ("kv-cache gpt2 --tp x", USAGE, "usage", ("--tp", "'x'")),
    ("kv-cache gpt2 --tp 5", USAGE, "tp", ("5 devices", "12 attention heads", "--tp")),
    ("kv-cache qwen2.5-0.5b --tp 7", USAGE, "tp", ("7 devices", "2 KV heads")),
    ("kv-cache gpt2 --sweep ct=1k", USAGE, "usage", ("--sweep 'ct'", "did you mean 'ctx'?")),
    ("kv-cache gpt2 --sweep 1k", USAGE, "usage", ("--sweep '1k' names no key", "ctx=1k..128k")),
    ("kv-cache transformer-base", USAGE, "no-ctx", ("transformer-base", "--ctx 8192")),
    ("params gpt2 --set kv_hads=1", USAGE, "edit", ("'kv_hads=1' is not a known edit", "did you mean 'kv_heads'?")),
    ("params gpt2 --set zzz", USAGE, "edit", ("known: ", "n_kv_heads", "positions")),
    ("params gpt2 --set ffn", USAGE, "edit", ("'ffn' needs a value", "write ffn=VALUE")),
    ("params gpt2 --set n_layers=two", USAGE, "edit", ("n_layers=two: not an integer",)),
    ("params gpt2 --set n_layers=0", USAGE, "edit", ("n_layers=0: outside 1..10,000",)),
    ("presets lst", USAGE, "usage", ("'lst' is neither list nor show", "llamactl presets list")),
    ("presets show", USAGE, "usage", ("show needs a name", "llamactl presets show llama-3-8b")),
    ("presets show lama-3-8b", MISSING, "preset-not-found", ("no preset 'lama-3-8b'", "did you mean llama-3-8b?")),
    ("params preset:lama-3-8b", MISSING, "preset-not-found", ("did you mean preset:llama-3-8b?",)),
    ("params preset:xyzzyplugh", MISSING, "preset-not-found", ("'llamactl presets' lists them",)),
    ("convert", USAGE, "usage", ("'SRC'", "llamactl convert --help")),
    ("convert gpt2", USAGE, "usage", ("'DST'", "llamactl convert --help")),
    ("convert gpt2 out", MISSING, "weights-not-found", ("gpt2", "without weights", "help: ")),
    ("convert preset:lama-3-8b out", MISSING, "preset-not-found", ("did you mean preset:llama-3-8b?",)),
    ("convert gpt2 out --to nanogtp", USAGE, "usage", ("--to 'nanogtp'", "did you mean nanogpt?")),
    ("convert gpt2 out --too meta", USAGE, "usage", ("no such option --too", "did you mean --to?")),
    ("convert gpt2 out --dtype int3", USAGE, "usage", ("--dtype 'int3'", "bf16, fp16, fp32, q8_0")),
    ("convert gpt2 out --shard-size 5", USAGE, "usage", ("--shard-size '5'", "5GB")),
    ("reference gpt2", USAGE, "usage", ("-o is missing", "help: ")),
    ("reference gpt2 -o r.safetensors", MISSING, "weights-not-found", ("gpt2", "without weights", "help: ")),
    ("reference gpt2 -o r.npy", USAGE, "usage", (".safetensors",)),
    ("convrt gpt2 out", USAGE, "usage", ("did you mean 'convert'?",)),
    ("schema", USAGE, "usage", ("COMMAND",)),
    ("schema parms", USAGE, "usage", ("no schema for 'parms'", "did you mean 'params'?")),
    ("schema xyzzy", USAGE, "usage", ("known: params, kv-cache",)),
    ("params", USAGE, "no-model", ("no MODEL given", f"help: {EXAMPLE}")),
    ("kv-cache", USAGE, "no-model", ("no MODEL given", f"help: {EXAMPLE}")),
    ("params --weights gpt2", USAGE, "no-folder", ("gpt2 is a preset", "--weights needs a local model folder")),
]


@pytest.mark.parametrize(("line", "code", "word", "parts"), WRONG, ids=[w[0].replace(" ", "_") or "nothing"
                                                                       for w in WRONG])
def test_a_wrong_command_line(cli: Any, line: str, code: int, word: str, parts: tuple[str, ...]) -> None:
    check(cli(*line.split()), code, word, *parts)


@pytest.mark.parametrize("ref", [
    "./x", "./x/y", "../nowhere", "/abs/none", "/abs/none/config.json", "C:\\x", "C:\\models\\Llama-3", ".\\x",
    "..\\x", "\\\\server\\share", "~/none", "none/config.json", "none.gguf", "model.safetensors", "a/b/c", ".hidden/",
    "with space", "C:/models/x", "./\u00fcml\u00e4ut",
])
@pytest.mark.parametrize("command", ["params", "kv-cache"])
def test_a_path_that_is_not_there_is_never_a_hub_id(cli: Any, command: str, ref: str) -> None:
    got = cli(command, ref)
    check(got, MISSING, "not-found", "no such file or folder", "help: ", ref)
    assert "repo" not in got.err.lower()


@pytest.mark.parametrize("ref", ["lama-3-8b", "gpt3", "lama-3-8b@main", "acme/none", "acme/none@v1", "hf://acme/none"])
def test_a_name_that_is_nothing_known_is_one_line_offline(run: Any, ref: str) -> None:
    for flags, env in (((), {"HF_HUB_OFFLINE": "1"}), (("--offline",), {"HF_HUB_OFFLINE": None})):
        got = run("params", ref, *flags, env=env)
        check(got, MISSING, "hub-offline", ref.removeprefix("hf://").partition("@")[0])
        if ref == "lama-3-8b":
            assert "did you mean preset:llama-3-8b?" in got.err


@pytest.mark.parametrize("args", [("meta-llama/Meta-Llama-3-8B", "--hub"), ("meta-llama/Meta-Llama-3-8B@main",),
                                  ("hf://meta-llama/Meta-Llama-3-8B",)])
def test_a_preset_does_not_answer_for_a_revision_or_the_hub(run: Any, args: tuple[str, ...]) -> None:
    got = run("params", *args, "--offline", env={"HF_HUB_OFFLINE": None})
    check(got, MISSING, "hub-offline", "meta-llama/Meta-Llama-3-8B", "run once without --offline")


def test_a_refused_connection_is_told(run: Any) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        env = {"HF_HUB_OFFLINE": None, "HF_ENDPOINT": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        got = run("params", "acme/none", env=env)  # which gives up after a minute
    check(got, MISSING, "hub-unreachable", "acme/none", "connection refused", "help: ")


@pytest.mark.parametrize("ref", ["a//b", "-bad/x", "a/b@", "a b/c", "hf://", "hf://a/b/c/d", "@main", "a/..", "%00"])
def test_what_is_neither_path_nor_id_is_one_line(run: Any, ref: str) -> None:
    got = run("params", "--offline", "--", ref)
    assert got.code in (USAGE, MISSING)
    check(got, got.code, "[a-z-]+", "help: ")


# ---- folders


def test_the_current_folder_answers_where_it_has_a_config(cli: Any, folder: Any, tiny: Any, tmp_path: Path) -> None:
    path = folder()
    assert cli("params", "-q", cwd=path).out == f"{tiny.total}\n"
    assert cli("kv-cache", "-q", "--ctx", "1", cwd=path).out == f"{2 * 2 * 2 * 8 * 4}\n"
    model = cli("params", "--json", cwd=path).json()["model"]
    assert (model["source"], model["id"]) == ("local", "model")
    for ref in (".", "config.json", "./config.json", str(path), f"{path}/", path / "config.json", "../model"):
        assert cli("params", ref, "-q", cwd=path).out == f"{tiny.total}\n"
    for ref in ("model", "model/", "./model", "~/model"):
        assert cli("params", ref, "-q").out == f"{tiny.total}\n"
    (tmp_path / "empty").mkdir()
    check(cli("params", cwd=tmp_path / "empty"), USAGE, "no-model", EXAMPLE)


def test_a_folder_named_like_a_preset_wins_where_it_holds_a_model(cli: Any, folder: Any, tiny: Any,
                                                                  tmp_path: Path) -> None:
    (tmp_path / "gpt2").mkdir()
    assert cli("params", "gpt2", "-q").out == "124439808\n"
    folder(name="gpt2")
    assert cli("params", "gpt2", "-q").out == f"{tiny.total}\n"
    assert cli("params", "preset:gpt2", "-q").out == "124439808\n"


@pytest.mark.parametrize("command", ["params", "kv-cache"])
def test_folders_that_hold_no_model(cli: Any, tmp_path: Path, command: str) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    check(cli(command, empty), REFUSED, "no-model", str(empty), "no config.json, params.json or .gguf here", "help: ")
    check(cli(command, "empty"), REFUSED, "no-model", "empty: no config.json")  # and no question to the Hub
    (empty / "model.safetensors").write_bytes(b"")
    check(cli(command, empty), REFUSED, "config-missing-file", "weights without a config.json", "help: copy")
    check(cli(command, empty / "model.safetensors"), REFUSED, "config-missing-file", "weights alone", "help: give")
    (empty / "config.json").mkdir()
    check(cli(command, empty), REFUSED, "not-a-file", "config.json", "not a regular file")
    (empty / "config.json").rmdir()
    (empty / "config.json").symlink_to("gone/config.json")
    check(cli(command, empty), REFUSED, "dangling-link", "gone/config.json", "help: ")
    (empty / "config.json").unlink()
    os.mkfifo(empty / "config.json")
    check(cli(command, empty), REFUSED, "not-a-file", "not a regular file")


def test_a_config_above_the_cap_is_refused_by_its_size(cli: Any, folder: Any, within: Any) -> None:
    path = folder()
    with (path / "config.json").open("r+b") as f:
        f.truncate(64_000_001)
    with within(20):
        check(cli("params", path), REFUSED, "json-too-large", "64,000,001 bytes", "64,000,000")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_config_that_may_not_be_read(cli: Any, folder: Any) -> None:
    path = folder()
    (path / "config.json").chmod(0)
    check(cli("params", path), REFUSED, "io-permission", "config.json", "Permission denied")


# ---- configs


@pytest.mark.parametrize(("model_type", "near"), [
    ("lama", "llama"), ("llama5", "llama4"), ("gpt_2", "gpt2"), ("qwen2moe", "qwen2_moe"), ("mixtrall", "mixtral"),
    ("gemma-3", "gemma3"), ("Llama", "llama"), ("deepseek_v33", "deepseek_v3"), ("zzzzzzzz", ", "),
])
@pytest.mark.parametrize("command", ["params", "kv-cache"])
def test_an_unknown_architecture_names_the_nearest(cli: Any, folder: Any, tiny: Any, command: str, model_type: str,
                                                   near: str) -> None:
    got = cli(command, folder({**tiny.config, "model_type": model_type}), "--json")
    error = got.json()["error"]
    assert (got.code, error["code"]) == (REFUSED, "config-model-type")
    assert f"model_type '{model_type}' is not supported" in error["message"]
    assert near in error["message"].partition("nearest known: ")[2]
    assert error["path"].endswith("config.json")


CONFIGS: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"model_type": None}, "config-model-type", ("no model_type", "help: add")),
    ({"model_type": 7}, "config-type", ("model_type",)),
    ({"model_type": "acme", "auto_map": {"AutoModel": "x.Y"}}, "config-remote-code", ("never run", "nearest known")),
    ({"hidden_size": None}, "config-type", ("hidden_size is null",)),
    ({"vocab_size": "101"}, "config-type", ("vocab_size is '101', not an integer",)),
    ({"num_hidden_layers": True}, "config-type", ("num_hidden_layers is true",)),
    ({"num_hidden_layers": 10**9}, "config-range", ("num_hidden_layers is 1,000,000,000", "1..10,000")),
    ({"num_attention_heads": 0}, "config-range", ("num_attention_heads is 0", "1..65,536")),
    ({"num_key_value_heads": 3}, "config-heads", ("8 heads cannot share 3 KV heads",)),
    ({"hidden_size": 63}, "config-heads", ("63 is not divisible by 8 heads", "head_dim")),
    ({"intermediate_size": 1e18}, "config-range", ("intermediate_size",)),
    ({"hidden_act": "sillu"}, "config-activation", ("'sillu'", "did you mean 'silu'?")),
    ({"torch_dtype": "bf17"}, "config-dtype", ("bf17",)),
    ({"rope_scaling": {"rope_type": "yarnn", "factor": 2.0}}, "config-rope", ("yarnn", "yarn")),
    ({"rope_theta": -1.0}, "config-range", ("rope_theta",)),
    ({"layer_types": ["full_attention"]}, "config-layers", ("1 entries for 2 layers",)),
]


@pytest.mark.parametrize(("change", "word", "parts"), CONFIGS, ids=[f"{next(iter(c[0]))}-{c[1]}" for c in CONFIGS])
def test_a_config_that_cannot_be_judged_is_refused(cli: Any, folder: Any, tiny: Any, change: dict[str, Any], word: str,
                                                   parts: tuple[str, ...]) -> None:
    path = folder({**tiny.config, **change})
    for args in (("params", path), ("kv-cache", path, "--ctx", "64")):
        check(cli(*args), REFUSED, word, "model/config.json: ", *parts)


@pytest.mark.parametrize(("key", "typo"), [("hidden_size", "hidden_sise"), ("vocab_size", "vocabsize"),
                                           ("num_hidden_layers", "num_hiden_layers"),
                                           ("intermediate_size", "intermediat_size")])
def test_a_shape_that_is_missing_is_never_filled_in(cli: Any, folder: Any, tiny: Any, key: str, typo: str) -> None:
    config = {k: v for k, v in tiny.config.items() if k != key}
    check(cli("params", folder(config)), REFUSED, "config-missing", f"{key} is missing")
    check(cli("params", folder({**config, typo: 64})), REFUSED, "config-missing", f"did you mean '{typo}'")


@pytest.mark.parametrize(("data", "word", "parts"), [
    (b"", "json-empty", ()), (b" \n", "json-empty", ()), (b'{"a": 1,}', "json-syntax", ("line 1",)),
    (b'{"a": 1} x', "json-syntax", ("line 1",)), (b"[1]", "config-type", ("list",)),
    (b"null", "config-type", ("null",)),
    (b'{"a": 1, "a": 2}', "json-duplicate", ("'a'",)),
    (b'{"model_type": "llama", "hidden_size": NaN}', "config-type", ("hidden_size is nan",)),
    (b"[" * 100_000, "json-depth", ("64",)), (b'{"a": ' + b"9" * 5000 + b"}", "config-range", ("5000 digits",)),
    ("{}".encode("utf-16"), "json-encoding", ("UTF-8",)), (b'{"a": 1e999}', "config-range", ("64-bit",)),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "lfs-pointer", ("git lfs pull",)),
])
def test_a_file_that_is_no_config_is_refused(cli: Any, folder: Any, data: bytes, word: str,
                                             parts: tuple[str, ...]) -> None:
    check(cli("params", folder(data)), REFUSED, word, "config.json", *parts)


def test_every_missing_shard_is_named_at_once(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder()
    names = list(tiny.tensors(tiny.config))
    shards = {n: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, n in enumerate(names)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    tiny.write(path / "model-00002-of-00003.safetensors",
               {n: t for n, t in tiny.tensors(tiny.config).items() if "-00002-" in shards[n]})
    check(cli("params", path, "--weights"), REFUSED, "shard-missing", "model-00001-of-00003.safetensors",
          "model-00003-of-00003.safetensors")
    assert cli("params", path, "-q").out == f"{tiny.total}\n"
