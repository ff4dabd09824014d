"""`llamactl bench`: its answer in every form, a real run against transformers, and every way to ask for it wrongly."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

SHORT = ("--prompt-tokens", "12", "--decode-after", "3,5", "--new", "4", "--batch", "1,2", "--repeat", "2")
TINY = ("--prompt-tokens", "4", "--decode-after", "3", "--new", "2", "--batch", "1", "--repeat", "1")


@pytest.fixture(scope="module")
def model(speaker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = speaker.write(tmp_path_factory.mktemp("speaker"), speaker.chain("Abc"))
    return path


def test_a_real_run_against_transformers(cli: Any, model: Path) -> None:
    got = cli("bench", model, *SHORT, "--against", "transformers", "--threads", "1", "--json")
    assert (got.code, got.err) == (0, "")
    body, one = got.json(), got.model
    assert body["inputs"] == {"prompts": [12], "after": [3, 5], "new": 4, "batches": [1, 2], "repeat": 2, "rivals":
                              ["transformers"], "gguf": None, "device": "auto", "dtype": "auto", "threads": 1,
                              "compile": False, "pack": False, "quant": None}
    assert (one["device"], one["dtype"], one["threads"], one["repeat"]) == ("cpu", "fp32", 1, 2)
    assert [e["name"] for e in one["engines"]] == ["llamactl", "transformers"]
    assert all(e["load_seconds"] > 0 < e["first_token_seconds"] and e["dtype"] == "fp32" for e in one["engines"])
    assert one["first_token_prompt"] == 3
    assert one["weights_bytes"] == 4 * cli("params", model, "--json").model["total"]
    cases = [("prefill", 12, b, 0) for b in (1, 2)] + [("decode", n, b, 4) for b in (1, 2) for n in (3, 5)]
    rows = one["rows"]
    assert [(r["phase"], r["tokens"], r["batch"], r["new"], r["engine"]) for r in rows] == [
        (*c, e) for c in cases for e in ("llamactl", "transformers")]
    for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
        made = ours["batch"] * (ours["new"] or ours["tokens"])
        for r in (ours, theirs):
            rates = [made / s for s in r["seconds"]]
            assert len(rates) == 2
            assert r["tokens_per_second"] == {"median": pytest.approx(sum(rates) / 2), "min": min(rates),
                                              "max": max(rates)}
            steps = r["tokens_per_second"]["median"] / made * (r["new"] or 1)
            work, most = ((r["step_bytes"], one["bandwidth_bytes_per_second"]) if r["phase"] == "decode" else
                          (r["flops"], one["matmul_flops_per_second"]))
            assert r["share"] == pytest.approx(steps * work / most)
        pairs = [b / a for a, b in zip(ours["seconds"], theirs["seconds"], strict=True)]
        assert ours["ratio"] is None
        assert theirs["ratio"] == {"median": pytest.approx(sum(pairs) / 2), "min": min(pairs), "max": max(pairs)}


def test_plain_md_csv_and_quiet(cli: Any, model: Path) -> None:
    got = cli("bench", model, *TINY, "--format", "plain")
    assert (got.code, got.err) == (0, "")
    assert "computed  in fp32 on cpu" in got.out
    assert re.search(r"^prompt of 4 +1  llamactl +[\d.,]+ +[\d.,]+\.\.[\d.,]+ +[\d.]+% matmul$", got.out, re.M), got.out
    assert re.search(r"^2 after 3 +1  llamactl +[\d.,]+ +[\d.,]+\.\.[\d.,]+ +[\d.]+% memory$", got.out, re.M)
    assert "where these come from" not in got.out
    assert "where these come from" in cli("bench", model, *TINY, "-v").out
    assert "| prompt of 4 | 1 | llamactl |" in cli("bench", model, *TINY, "--format", "md").out
    rows = list(csv.DictReader(io.StringIO(cli("bench", model, *TINY, "--format", "csv").out)))
    assert [(r["phase"], r["tokens"], r["batch"], r["new"], r["engine"], r["rounds"]) for r in rows] == [
        ("prefill", "4", "1", "0", "llamactl", "1"), ("decode", "3", "1", "2", "llamactl", "1")]
    assert float(rows[0]["tokens_per_second_median"]) > 0
    assert rows[0]["ratio_median"] == ""
    quiet = cli("bench", model, *TINY, "-q")
    assert re.fullmatch(r"[\d.e+]+\n", quiet.out)


def test_ratios_stand_in_the_table_where_there_is_a_rival(cli: Any, model: Path) -> None:
    out = cli("bench", model, *TINY, "--against", "transformers").out
    assert "llamactl / it" in out
    assert len(re.findall(r"[\d.]+x +[\d.]+\.\.[\d.]+$", out, re.M)) == 2
    assert "llamactl / it" not in cli("bench", model, *TINY).out


def test_a_comma_separates_and_never_groups(cli: Any, model: Path) -> None:
    args = ("--decode-after", "3,128", "--prompt-tokens", "2", "--new", "1", "--batch", "1", "--repeat", "1", "--json")
    assert cli("bench", model, *args).json()["inputs"]["after"] == [3, 128]


def test_default_lengths_fit_the_model_and_longer_ones_are_a_warning(cli: Any, folder: Any, tiny: Any) -> None:
    path = folder(tensors=tiny.tensors(tiny.config))  # 128 positions
    got = cli("bench", path, "--batch", "1", "--repeat", "1")
    assert (got.code, got.err) == (0, "")
    assert "prompt of 128" in got.out
    assert "64 after 32" in got.out
    long = cli("bench", path, *TINY[2:], "--prompt-tokens", "129")
    assert long.code == 0
    assert long.err.startswith("warning[context-exceeded]: up to 129 tokens, past the 128 positions")


def test_packing_where_it_gains_nothing_is_a_warning(cli: Any, model: Path) -> None:
    got = cli("bench", model, *TINY, "--pack", "--json")
    assert (got.code, got.err) == (0, "")
    assert [w["code"] for w in got.json()["warnings"]] == ["pack"]
    assert got.model["packed"] is True


def test_matrices_in_8_bits(cli: Any, model: Path) -> None:
    got = cli("bench", model, *TINY, "--quant", "int8", "--against", "transformers", "--json").model
    assert (got["dtype"], got["quant"]) == ("bf16", "int8")
    quality = got["quant_quality"]
    assert 0 <= quality["mean_kl"] <= quality["max_kl"] < 1
    assert quality["positions"] > 0
    assert 0 <= quality["top1_agreement"] <= 1
    assert [e["dtype"] for e in got["engines"]] == ["int8", "bf16"]
    plain = cli("bench", model, *TINY, "--dtype", "bf16", "--json").model
    assert got["weights_bytes"] < plain["weights_bytes"]
    ours, theirs = got["rows"][2:]
    assert ours["step_bytes"] < theirs["step_bytes"] == plain["rows"][1]["step_bytes"]
    refused(cli("bench", model, *TINY, "--quant", "int8", "--dtype", "fp32"), 2, "dtype", "computes in bf16")


def refused(got: Any, code: int, word: str, *parts: str) -> None:
    assert (got.code, got.out) == (code, "")
    assert re.fullmatch(rf"error\[{word}\]: .*\n(help: .*\n)?", got.err), got.err
    for part in parts:
        assert part in got.err


@pytest.mark.parametrize(("args", "parts"), [
    ("--against vllm", ("--against 'vllm' is not one of transformers, llama.cpp",)),
    ("--gguf x.gguf", ("--gguf is what llama.cpp reads", "add --against llama.cpp")),
    ("--device tpu", ("--device 'tpu' is not one of auto, cuda",)), ("--dtype fp8", ("--dtype 'fp8'",)),
    ("--quant int4", ("--quant 'int4' is not one of int8",)),
    ("--prompt-tokens 1,024", ("--prompt-tokens '1,024'", "'024' is no number")),
    ("--prompt-tokens 4,,5", ("'' is no number",)), ("--decode-after x", ("--decode-after 'x' is not a number",)),
    ("--batch 0", ("--batch '0'",)), ("--batch -1", ("-1",)), ("--new 0", ("--new",)), ("--repeat 0", ("--repeat",)),
])
def test_wrong_words(cli: Any, model: Path, args: str, parts: tuple[str, ...]) -> None:
    refused(cli("bench", model, *args.split()), 2, "usage", *parts)


def absent(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    there = importlib.util.find_spec
    for module in ("llamactl.net.rivals", "llamactl.cli.located"):
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name in names else there(name))


def test_what_is_not_installed(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "transformers", "llama_cpp")
    refused(cli("bench", model, "--against", "transformers"), 4, "extra-missing", "needs transformers, which is not",
            "pip install 'llamactl[reference]'")
    refused(cli("bench", model, "--against", "llama.cpp"), 4, "extra-missing", "pip install llama-cpp-python")
    absent(monkeypatch, "torch")
    refused(cli("bench", model, *TINY), 4, "extra-missing", "needs torch")


def test_no_weights(cli: Any, folder: Any) -> None:
    refused(cli("bench", "llama-3-8b"), 4, "weights-not-found")
    got = cli("bench", folder())
    assert got.code == 3
    assert "error[no-weights]" in got.err


def test_where_llama_cpp_reads(cli: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamactl.net.rivals.find_spec", lambda _: object())
    say = ("bench", model, *TINY, "--against", "llama.cpp")
    refused(cli(*say), 2, "usage", "--against llama.cpp needs a .gguf file", "--gguf FILE")
    refused(cli(*say, "--gguf", tmp_path / "none.gguf"), 4, "not-found", "none.gguf")
    refused(cli(*say, "--gguf", model), 3, "rival-format", "llama.cpp reads a .gguf file")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    assert cli(*say, "--gguf", tmp_path / "bad.gguf").code == 3


def test_another_models_gguf_is_refused(cli: Any, model: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    path = tmp_path / "other.gguf"
    w = gguf.GGUFWriter(str(path), "llama")
    for word, value in (("context_length", 64), ("embedding_length", 32), ("block_count", 1),
                        ("feed_forward_length", 48)):
        getattr(w, f"add_{word}")(value)
    w.add_head_count(4)
    w.add_head_count_kv(2)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(50)
    shapes = {"token_embd": (50, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,),
              "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
              "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (48, 32), "blk.0.ffn_up": (48, 32),
              "blk.0.ffn_down": (32, 48)}
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", np.zeros(shape, dtype=np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    monkeypatch.setattr("llamactl.net.rivals.find_spec", lambda _: object())
    refused(cli("bench", model, *TINY, "--against", "llama.cpp", "--gguf", path), 3, "rival-model",
            "another model: 50 tokens x 32 in 1 layers, not 258 x 288 in 1")
    refused(cli("bench", path, *TINY, "--against", "transformers"), 3, "rival-format", "Hugging Face's form")


def test_past_the_table_of_positions(cli: Any, written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gpt2"
    written.saved(path, written.config_of("gpt2", n_positions=40))
    with monkeypatch.context() as m:
        m.setattr("llamactl.net.bench.start", lambda *_: pytest.fail("it was loaded"))
        refused(cli("bench", path, "--decode-after", "30", "--new", "11", "--prompt-tokens", "3"), 3, "too-long",
                "41 tokens", "ends at 40")
    got = cli("bench", path, "--batch", "1", "--repeat", "1", "--json")
    assert [(r["tokens"], r["new"]) for r in got.model["rows"]] == [(40, 0), (1, 39)]


def test_out_of_memory_is_one_line(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = 5 * 2 * 36 * 4  # a sequence's: k and v of 36, in fp32, mapped weights take nothing
    monkeypatch.setattr("llamactl.net.device.free_memory", lambda _: 3 * cache)
    assert cli("bench", model, *TINY, "--batch", "3").code == 0
    refused(cli("bench", model, *TINY, "--batch", "1,4"), 5, "memory", "out of memory on cpu: weights and a cache of "
            f"20 tokens take {4 * cache:,} B; {3 * cache:,} B are free", "lower --batch")

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("llamactl.net.bench.measure", full)
    refused(cli("bench", model, *TINY), 5, "memory", "out of memory on cpu")


def test_no_such_device(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(cli("bench", model, *TINY, "--device", "cuda"), 4, "no-device")


def test_the_folder_one_stands_in(cli: Any, model: Path, tmp_path: Path) -> None:
    assert cli("bench", *TINY, "--json", cwd=model).model["family"] == "llama"
    refused(cli("bench", *TINY, cwd=tmp_path), 2, "no-model", "no MODEL")


def test_a_terminal_is_told_what_is_timed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.analysis.bench import Case
    from llamactl.cli.benching import _teller
    from llamactl.cli.options import Output

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("CI", raising=False)
    screen = Screen()
    monkeypatch.setattr("sys.stderr", screen)
    case = Case(phase="decode", tokens=1000, batch=2, new=64)
    for format, quiet in (("json", False), ("plain", True)):
        _teller(Output(format=format, quiet=quiet, verbose=False, color=None))(case)
    assert screen.getvalue() == ""
    _teller(Output(format="plain", quiet=False, verbose=False, color=None))(case)
    assert screen.getvalue() == "timing 64 tokens after 1,000 tokens, batch 2\n"


def test_json_follows_its_schema(cli: Any, model: Path) -> None:
    from jsonschema import Draft202012Validator

    schema = cli("schema", "bench").json()
    body = cli("bench", model, *TINY, "--json").json()
    Draft202012Validator(schema).validate(body)
    broken = json.loads(json.dumps(body))
    broken["result"]["models"][0]["rows"][0]["tokens_per_second"] = 5
    assert not Draft202012Validator(schema).is_valid(broken)
