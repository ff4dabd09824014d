"""`llamactl generate`: what is written where and when, how it ends, and every way to ask for it wrongly."""

from __future__ import annotations

import io
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SPEEDS = (r"prompt (1 token|\d+ tokens) at [\d.,]+/s; generated (1 token|\d+ tokens)( at [\d.,]+/s)? "
          r"\((end token|stop string|--max-new reached|no positions left)\)(; first token after [\d.e-]+ s)?; "
          r"peak memory [\d,]+ B \([^)]*\)(; \d+% of the [\d.,]+ GB/s that cpu reads)?\n")
HOSTILE = "\x1b[31m\n\t\u202e\u00e9\U0001f601Z"
MODEL_EXAMPLE = "help: try: llamactl generate ./my-model --prompt 'Once upon a time'\n"


@pytest.fixture(scope="module")
def say(speaker: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """say(text, ...): a model that goes on from "A" with `text`, which has no byte twice; see speaker.write."""

    def make(text: str = HOSTILE, *, then: Any = None, **options: Any) -> Path:
        then = (speaker.END,) if then is None else then
        folder: Path = speaker.write(tmp_path_factory.mktemp("say"), speaker.chain("A" + text, then=then), **options)
        return folder

    return make


@pytest.fixture(scope="module")
def model(say: Callable[..., Path]) -> Path:
    return say()


# ---- the text


def test_the_text_is_all_there_is_on_stdout_and_one_line_on_stderr(cli: Any, model: Path) -> None:
    for extra in ((), ("--greedy",), ("--seed", "3"), ("--format", "plain")):
        got = cli("generate", model, "--prompt", "A", *extra)
        assert (got.code, got.out) == (0, HOSTILE + "\n")  # it ends a line
        assert re.fullmatch(SPEEDS, got.err), got.err
        assert "(end token)" in got.err


def test_quiet_is_the_text_alone(cli: Any, model: Path) -> None:
    for flags in (("-q",), ("-q", "--json")):
        got = cli("generate", model, "-p", "A", *flags)
        assert (got.code, got.out, got.err) == (0, HOSTILE + "\n", "")


def test_verbose_says_device_dtype_and_settings(cli: Any, model: Path) -> None:
    got = cli("generate", model, "-p", "A", "-v", "--top-k", "5", "--seed", "7")
    first, rest = got.err.split("\n", 1)
    assert re.fullmatch(r"cpu, \d+ threads?; fp32; temperature 0.8 \(default\), top_k 5 \(--top-k\), seed 7", first)
    assert re.fullmatch(SPEEDS, rest)


@pytest.mark.parametrize("args", [("--prompt", "A"), ("--tokens", "65"), ("--prompt-file", "p.txt")])
def test_every_way_to_give_a_prompt(cli: Any, model: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    (tmp_path / "p.txt").write_text("A")
    assert cli("generate", model, "-q", *args).out == HOSTILE + "\n"


@pytest.mark.parametrize("args", [(), ("-",), ("--prompt", "-"), ("--prompt-file", "-")])
def test_a_prompt_on_standard_input(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch,
                                    args: tuple[str, ...]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"xyzA")))
    got = cli("generate", model, *args, "--json", "--greedy")
    assert got.model["prompt_token_ids"] == [*b"xyzA"]
    assert got.model["text"] == HOSTILE


def test_the_prompt_stays_exactly_as_it_is(cli: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbf caf\xc3\xa9\r\n")
    got = cli("generate", model, "--prompt-file", "p.txt", "--json", "-n", "1")
    assert got.model["prompt_token_ids"] == [*" caf\u00e9\r\n".encode()]


def test_an_empty_prompt_needs_a_token_of_the_tokenizers_own(cli: Any, model: Path, say: Callable[..., Path],
                                                             speaker: Any) -> None:
    got = cli("generate", model, "--prompt", "")
    assert (got.code, got.out) == (2, "")
    assert "error[prompt-empty]: the prompt has no tokens" in got.err
    begun = say("bc", bos=True, then=(speaker.END, speaker.BOS))
    assert cli("generate", begun, "--prompt", "", "-q").out == "Abc\n"


def test_token_ids_need_no_tokenizer_and_are_answered_with_ids(cli: Any, say: Callable[..., Path]) -> None:
    bare = say("bcd", words=False)
    assert cli("generate", bare, "--tokens", "65, 98", "-q").out == "99 100\n"
    got = cli("generate", bare, "--tokens", "65", "--json").model
    assert (got["text"], got["token_ids"], got["stop"]) == (None, [98, 99, 100, 257], "end")
    refused = cli("generate", bare, "--prompt", "A")
    assert refused.code == 4
    assert "error[tokenizer-missing]" in refused.err
    assert "--tokens" in refused.err
    assert cli("generate", bare, "--tokens", "65", "--stop", "c").code == 4


# ---- ends


def test_stop_strings_end_it_before_them(cli: Any, model: Path) -> None:
    for stop, text in ((("\u00e9",), "\x1b[31m\n\t\u202e"), (("1m\n", "zz"), "\x1b[3"), (("Z", "\U0001f601"),
                       HOSTILE[:-2]), (("1mX",), HOSTILE)):
        got = cli("generate", model, "-p", "A", "--json", *(w for s in stop for w in ("--stop", s))).model
        assert got["text"] == text
        assert got["stop"] == ("end" if text == HOSTILE else "stop")


def test_what_was_held_back_comes_at_the_end(cli: Any, model: Path) -> None:
    half = HOSTILE.encode()[:11].decode("utf-8", "replace")
    assert half.endswith("\t\u202e\ufffd")
    for n, stop, text in (("11", "QQ", half), ("5", "1mX", "\x1b[31m")):
        args = ("generate", model, "-p", "A", "-n", n, "--stop", stop)
        assert cli(*args, "-q").out == text + "\n"
        assert cli(*args, "--json").model["text"] == text


def test_any_token_of_the_list_ends_it_and_ignore_end_goes_on(cli: Any, say: Callable[..., Path]) -> None:
    path = say("bcdef", then=(), files={"generation_config.json": {"eos_token_id": [200, ord("e"), 257]}})
    got = cli("generate", path, "-p", "A", "--json").model
    assert (got["text"], got["stop"], got["token_ids"]) == ("bcd", "end", [*b"bcde"])
    got = cli("generate", path, "-p", "A", "--ignore-end", "-n", "8", "--json").model
    assert (got["text"], got["stop"]) == ("bcdefAbc", "length")


@pytest.mark.parametrize("n", [0, 1, 2])
def test_max_new(cli: Any, say: Callable[..., Path], n: int) -> None:
    got = cli("generate", say("bcdef"), "-p", "A", "-n", str(n))
    assert (got.code, got.out) == (0, "bcdef"[:n] + "\n")
    assert f"generated {n} token{'' if n == 1 else 's'}" in got.err
    assert "reached" in got.err


def test_past_the_models_context_is_a_warning(cli: Any, say: Callable[..., Path], speaker: Any) -> None:
    path = say("bc", files={"config.json": speaker.CONFIG | {"max_position_embeddings": 16}})
    got = cli("generate", path, "-p", "A", "-n", "16")
    assert got.err.startswith("warning[context-exceeded]: prompt and text may be 17 tokens, past the 16 positions")
    body = cli("generate", path, "-p", "A", "-n", "16", "--json")
    assert (body.err, [w["code"] for w in body.json()["warnings"]]) == ("", ["context-exceeded"])
    assert "warning" not in cli("generate", path, "-p", "A", "-n", "15").err


# ---- JSON


def test_json_holds_everything_and_nothing_is_streamed(cli: Any, model: Path, speaker: Any) -> None:
    got = cli("generate", model, "-p", "A", "--greedy", "--logprobs", "--json", "--stop", "Q")
    assert (got.code, got.err) == (0, "")
    body, one = got.json(), got.model
    assert body["inputs"]["prompt"] == "A"
    assert body["inputs"]["stop"] == ["Q"]
    assert one["text"] == HOSTILE
    assert one["token_ids"] == [*HOSTILE.encode(), speaker.END]
    assert one["prompt_tokens"] == 1
    assert one["generated_tokens"] == len(one["token_ids"]) == len(one["logprobs"])
    assert all(-0.001 < x < 0 for x in one["logprobs"])
    assert one["sampling"] | {"seed": 0} == {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
                                             "repetition_penalty": 1.0, "seed": 0}
    assert one["first_token_seconds"] >= one["prefill_seconds"] > 0
    rate = (one["generated_tokens"] - 1) / one["decode_seconds"]
    assert one["decode_tokens_per_second"] == pytest.approx(rate)
    share = rate * one["decode_bytes_per_token"] / one["bandwidth_bytes_per_second"]
    assert one["bandwidth_share"] == pytest.approx(share)
    assert one["kv_cache_bytes"] == 128 * 2 * 36 * 4  # prompt and 127 of the text, one KV head of 36, fp32
    weights = one["weights_bytes"]
    assert weights == 4 * cli("params", model, "--json").model["total"]
    # all but the embedding, of which one row is read, and 18 tokens of the cache
    assert one["decode_bytes_per_token"] == weights - 4 * 258 * 288 + 18 * 2 * 36 * 4
    assert one["peak_memory_bytes"] > weights


def test_logprobs_stay_out_unless_asked_for(cli: Any, model: Path) -> None:
    assert cli("generate", model, "-p", "A", "--json").model["logprobs"] is None
    for flags in ((), ("-q",), ("-q", "--json")):
        got = cli("generate", model, "-p", "A", "--logprobs", *flags)
        assert (got.code, got.out if "--json" not in flags else "") == (2, "")
        assert "help: add --json" in got.err


def test_a_seed_is_a_text_and_every_run_names_its_own(cli: Any, model: Path) -> None:
    def text(*flags: str) -> tuple[str, int]:
        got = cli("generate", model, "-p", "A", "--temperature", "9", "-n", "30", "--ignore-end", "--json", *flags)
        return got.model["text"], got.model["sampling"]["seed"]

    first, seed = text()
    assert text("--seed", str(seed)) == (first, seed)
    assert text("--seed", str(seed + 1))[0] != first
    assert text()[1] != seed


# ---- settings


def test_the_models_own_settings_are_the_defaults(cli: Any, say: Callable[..., Path]) -> None:
    own = {"eos_token_id": 257, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "do_sample": True}
    path = say(files={"generation_config.json": own})
    got = cli("generate", path, "-p", "A", "--json", "--top-k", "3", "--repetition-penalty", "1.1").model["sampling"]
    assert got | {"seed": 0} == {"temperature": 0.6, "top_k": 3, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.1,
                                 "seed": 0}
    assert cli("generate", path, "-p", "A", "--json", "--top-k", "0").model["sampling"]["top_k"] == 0
    said = cli("generate", path, "-p", "A", "-v", "--top-k", "3").err
    assert "temperature 0.6 (generation_config.json), top_k 3 (--top-k), top_p 0.9 (generation_config.json)" in said
    assert cli("generate", path, "-p", "A", "--json", "--greedy").model["sampling"]["temperature"] == 0


def test_a_model_that_is_never_drawn_from_is_greedy_unless_asked(cli: Any, say: Callable[..., Path]) -> None:
    path = say(files={"generation_config.json": {"do_sample": False, "temperature": 0.6, "eos_token_id": 257}})

    def temperature(*flags: str) -> float:
        found: float = cli("generate", path, "-p", "A", "--json", *flags).model["sampling"]["temperature"]
        return found

    assert temperature() == temperature("--repetition-penalty", "1.2") == 0
    assert temperature("--top-k", "5") == 0.6
    assert temperature("--temperature", "1.5") == 1.5


def test_chat_writes_the_models_own_template(cli: Any, say: Callable[..., Path]) -> None:
    template = ("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
                "{% if add_generation_prompt %}A{% endif %}")
    path = say(files={"tokenizer_config.json": {"chat_template": template}})
    got = cli("generate", path, "--chat", "--system", "be brief", "--prompt", "hi", "--json").model
    assert bytes(got["prompt_token_ids"]) == b"[system:be brief][user:hi]A"
    assert got["text"] == HOSTILE
    assert cli("generate", path, "--chat", "-p", "hi", "-q").out == HOSTILE + "\n"


def test_a_space_after_the_prompt_belongs_to_the_text_and_one_before_an_answer_does_not(
        cli: Any, say: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl import tokens

    made = []

    class Watched(tokens.Stream):
        def __init__(self, *args: Any, follows: bool, **options: Any) -> None:
            made.append(follows)
            super().__init__(*args, follows=follows, **options)

    monkeypatch.setattr(tokens, "Stream", Watched)
    path = say(files={"tokenizer_config.json": {"chat_template": "A"}})
    for args in (("-p", "A"), ("--tokens", "65"), ("-p", "hi", "--chat")):
        assert cli("generate", path, *args, "-q").out == HOSTILE + "\n"
    assert made == [True, True, False]


@pytest.mark.parametrize(("stored", "asked", "dtype"), [
    ("float32", "auto", "fp32"), ("bfloat16", "auto", "bf16"), ("float16", "auto", "fp32"), ("float16", "fp16", "fp16"),
    ("float32", "bf16", "bf16"), ("bfloat16", "fp32", "fp32"),
])
def test_dtypes_on_a_cpu(cli: Any, say: Callable[..., Path], stored: str, asked: str, dtype: str) -> None:
    got = cli("generate", say(dtype=stored), "-p", "A", "--json", "--device", "cpu", "--dtype", asked).model
    assert (got["dtype"], got["device"], got["text"]) == (dtype, "cpu", HOSTILE)


def test_threads(cli: Any, model: Path) -> None:
    import torch

    before = torch.get_num_threads()
    try:
        got = cli("generate", model, "-p", "A", "--json", "--threads", "1")
        assert got.model["device_name"] == "cpu, 1 thread"
    finally:
        torch.set_num_threads(before)


# ---- streams


def test_a_terminal_gets_no_character_that_steers_it(terminal: Any, model: Path) -> None:
    got = terminal("generate", model, "-p", "A", "--greedy")
    assert (got.code, got.out) == (0, "\\x1b[31m\n\t\\u202e\u00e9\U0001f601Z\n")
    assert re.fullmatch(SPEEDS, got.err)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_narrow_code_page_never_crashes(run: Any, model: Path, encoding: str) -> None:
    env = {"LANG": "C", "PYTHONIOENCODING": encoding}
    got = run("generate", model, "-p", "A", "--greedy", env=env, decode=encoding)
    assert got.code == 0
    assert got.out == HOSTILE.encode(encoding, "backslashreplace").decode(encoding) + "\n"


@pytest.fixture
def endless(say: Callable[..., Path], tmp_path: Path, environment: Any) -> Callable[..., subprocess.Popen[bytes]]:
    """A process whose text goes round and round for minutes."""
    path = say("bcdefgh", then=())

    def start(*args: str) -> subprocess.Popen[bytes]:
        line = [sys.executable, "-c", ENDLESS, "generate", str(path), "-p", "A", "--greedy", "-n", "200000", *args]
        return subprocess.Popen(line, env=environment(tmp_path), cwd=tmp_path, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


ENDLESS = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored from the start
from llamactl.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize(("sent", "code", "word"), [(signal.SIGINT, 130, b"interrupted"),
                                                    (signal.SIGTERM, 143, b"terminated")])
def test_text_comes_as_it_is_written_and_stays_when_interrupted(endless: Any, sent: signal.Signals, code: int,
                                                                word: bytes) -> None:
    process = endless()
    begun = process.stdout.read(12)  # while it runs: in its own time it would end in minutes
    assert begun == b"bcdefghAbcde"
    assert process.poll() is None
    process.send_signal(sent)
    rest, err = process.communicate(timeout=120)
    assert process.returncode == code
    assert err == b"error[" + word + b"]: " + word + b"\n"
    text = begun + rest
    assert text == (b"bcdefghA" * len(text))[:len(text) - 1] + b"\n"  # what was written, and a line's end


def test_an_interrupted_json_answer_is_an_error_object(endless: Any) -> None:
    process = endless("--json")
    try:
        process.communicate(timeout=4)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (130, b"error[interrupted]: interrupted\n")
    assert json.loads(out)["error"]["code"] == "interrupted"


def test_a_reader_that_leaves_ends_it_silently(endless: Any) -> None:
    process = endless()
    assert process.stdout.read(3) == b"bcd"
    process.stdout.close()
    with process.stderr:
        err = process.stderr.read()
    assert (process.wait(timeout=120), err) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the kernel has no /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_text_that_finds_no_space_is_not_written(run: Any, model: Path, flags: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        got = run("generate", model, "-p", "A", *flags, stdout=full)
    assert (got.code, got.err) == (5, "error[stdout]: the answer could not be written: No space left on device\n")


# ---- rounded, packed, compiled


def test_matrices_in_8_bits(cli: Any, model: Path) -> None:
    got = cli("generate", model, "-p", "A", "--greedy", "--quant", "int8", "--json").model
    plain = cli("generate", model, "-p", "A", "--greedy", "--dtype", "bf16", "--json").model
    assert (got["text"], got["quant"], got["dtype"], plain["quant"]) == (HOSTILE, "int8", "bf16", None)
    # q, o and the MLP with its three matrices of 4 x 288, k and v of 36 rows: a byte for each, 2 for each row's scale
    saved = 2 * 288 * 288 + 2 * 36 * 288 + 3 * 4 * 288 - 2 * (2 * 288 + 2 * 36 + 4 + 4 + 288)
    for key in ("weights_bytes", "decode_bytes_per_token"):
        assert got[key] == plain[key] - saved
    assert "int8 matrices" in cli("generate", model, "-p", "A", "--quant", "int8", "-v").err


def test_what_8_bits_save_is_a_way_out(cli: Any, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.net import device

    monkeypatch.setattr(device, "free_memory", lambda _: 520_000)
    got = cli("generate", model, "-p", "A", "--dtype", "bf16")
    assert got.code == 5
    found = re.search(r"^help: --quant int8 takes ([\d,]+) B and fits$", got.err, re.M)
    assert found
    assert cli("generate", model, "-p", "A", "--quant", "int8", "-q").out == HOSTILE + "\n"
    monkeypatch.setattr(device, "free_memory", lambda _: int(found[1].replace(",", "")) - 1)
    assert "of int8 weights" in cli("generate", model, "-p", "A", "--quant", "int8").err


def test_packed_weights_write_the_same(cli: Any, say: Callable[..., Path]) -> None:
    path = say(dtype="bfloat16")
    assert cli("generate", path, "-p", "A", "--pack", "-q").out == HOSTILE + "\n"


def test_packed_weights_are_memory_taken(cli: Any, say: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.net import device

    path = say(dtype="bfloat16")
    monkeypatch.setattr(device, "free_memory", lambda _: 600_000)
    assert cli("generate", path, "-p", "A").code == 0
    assert cli("generate", path, "-p", "A", "--pack").code == 5


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_step_writes_the_same_and_is_kept(environment: Any, model: Path, tmp_path: Path) -> None:
    """The second start compiles nothing: it needs no compiler."""
    line = [sys.executable, "-m", "llamactl", "generate", str(model), "-p", "A", "--greedy", "--compile"]
    kept = {"LLAMACTL_CACHE": str(tmp_path / "kept")}
    kernels = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    for n, more in enumerate((kernels, {"CXX": "/none", "PATH": "/none"})):
        done = subprocess.run(line, env=environment(tmp_path, kept | more), timeout=600, cwd=tmp_path,
                              capture_output=True, stdin=subprocess.DEVNULL, check=False)
        assert (done.returncode, done.stdout.decode()) == (0, HOSTILE + "\n"), done.stderr
        note, _, speeds = done.stderr.decode().rpartition("note: compiling one token's step, once for these weights ")
        assert (note, speeds == done.stderr.decode()) == ("", n == 1)
        assert re.fullmatch(SPEEDS, speeds.partition("\n")[2] if n == 0 else speeds)
    assert len(list((tmp_path / "kept" / "compiled").iterdir())) == 1


def test_without_a_compiler_it_says_so(run: Any, model: Path, tmp_path: Path) -> None:
    env = {"CXX": "/none", "PATH": "/none", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels")}
    got = run("generate", model, "-p", "A", "--compile", "-q", env=env)
    assert (got.code, got.out) == (4, "")
    assert got.err.startswith("error[no-compiler]: the step was not compiled: ")
    assert got.err.endswith("\nhelp: go on without --compile, or install a C++ compiler\n")
    assert got.err.count("\n") == 2
    assert not list((tmp_path / ".cache" / "llamactl" / "compiled").iterdir())


@pytest.mark.parametrize("line", [("generate", "-p", "A"), ("generate", "-p", "A", "--quant", "int8"),
                                  ("generate", "-p", "A", "--json"), ("bench",), ("bench", "--json")])
def test_without_torch_one_line_says_what_to_install(line: tuple[str, ...], environment: Any, model: Path,
                                                     tmp_path: Path) -> None:
    """torch is really not there, as after a plain `pip install llamactl`: nothing may import it before it is missed."""
    blocked = "import sys; sys.modules['torch'] = None; from llamactl.__main__ import main; sys.exit(main())"
    command, *options = line
    done = subprocess.run([sys.executable, "-c", blocked, command, str(model), *options], env=environment(tmp_path),
                          cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 4
    if "--json" in line:
        assert json.loads(done.stdout)["error"]["code"] == "extra-missing"
    else:
        assert (done.stdout, done.stderr) == ("", "error[extra-missing]: running a model needs torch, which is not "
                                              "installed\nhelp: pip install 'llamactl[generate]'\n")
