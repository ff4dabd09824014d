"""transformers as the reference: its own logits in fp32, nothing made up, and one line where it cannot."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from llamactl.errors import InputRefused, NotAvailable
from llamactl.verify.callables import run_callable
from llamactl.verify.hf import transformers_side


@pytest.fixture
def folder(written: Any, tmp_path: Path) -> Path:
    written.saved(tmp_path / "m", written.config_of("llama"))
    return tmp_path / "m"


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_its_logits_are_the_goldens(written: Any, folder: Path, capsys: pytest.CaptureFixture[str], kernel: str
                                    ) -> None:
    ids, want = written.golden_logits("llama")
    side = transformers_side(str(folder), kernel=kernel)
    assert {p.dtype for p in side.parameters()} == {torch.float32}
    assert not side.training
    assert side.config._attn_implementation == kernel
    assert torch.allclose(run_callable(side, ids).logits, want, atol=2e-4)
    assert capsys.readouterr() == ("", "")


def test_halves_are_widened(written: Any, folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_file({k: v.bfloat16() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    assert {p.dtype for p in transformers_side(str(folder)).parameters()} == {torch.float32}


@pytest.mark.parametrize(("change", "part"), [
    (lambda s: s.pop("model.layers.0.mlp.up_proj.weight"), "model.layers.0.mlp.up_proj.weight"),
    (lambda s: s.update({"model.norm.weight": torch.ones(3)}), ""),
])
def test_weights_that_are_not_filled_are_refused(folder: Path, change: Any, part: str) -> None:
    """transformers itself draws them, and says so on standard error alone."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputRefused) as caught:
        transformers_side(str(folder))
    assert caught.value.code == "transformers-load"
    assert part in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("config", [None, "{", json.dumps({"model_type": "nothing_like_it"}),
                                    json.dumps({"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}})])
def test_what_it_does_not_read_is_one_line(folder: Path, config: str | None) -> None:
    (folder / "code.py").write_text(f"import pathlib; pathlib.Path({str(folder / 'was-here')!r}).touch()\n"
                                    "class Mine: ...\n")
    (folder / "config.json").unlink() if config is None else (folder / "config.json").write_text(config)
    with pytest.raises(InputRefused) as caught:
        transformers_side(str(folder))
    assert (caught.value.code, caught.value.path) == ("transformers-load", str(folder))
    assert not (folder / "was-here").exists()


def test_without_transformers_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("llamactl.verify.hf.find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(NotAvailable, match="transformers"):
        transformers_side(str(folder))
