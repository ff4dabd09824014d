"""Trained weights of a teaching package (glassllm, MIT): (in, out) matrices, neighbouring pairs, one small table.

Its own numpy forward is the reference. The files are not part of this project; without them the test is skipped.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llamactl import arch
from llamactl.arch._names import paired
from llamactl.net.decoder import build
from llamactl.net.weights import open_weights
from llamactl.spec.naming import Transposed, rule

H, L = "blocks.{i}.", "layers.{i}."
T = (Transposed(),)
TABLE = (
    rule("E", "embed.weight"), rule("norm_f.gamma", "norm.weight"), rule(f"{H}norm1.gamma", f"{L}attn_norm.weight"),
    rule(f"{H}norm2.gamma", f"{L}mlp_norm.weight"), rule(f"{H}attn.W_V", f"{L}attn.v.weight", ops=T),
    rule(f"{H}attn.W_O", f"{L}attn.o.weight", ops=T), rule(f"{H}ffn.W1", f"{L}mlp.gate.weight", ops=T),
    rule(f"{H}ffn.W3", f"{L}mlp.up.weight", ops=T), rule(f"{H}ffn.W2", f"{L}mlp.down.weight", ops=T),
    *(r._replace(stored=r.stored.removesuffix(".weight"), ops=(*r.ops, *T))
      for r in paired(f"{H}attn.W_Q", f"{H}attn.W_K") if r.stored.endswith("weight")),
)


def package() -> Path | None:
    """The folder of glassllm, where it is installed or lies in /work/tmp."""
    spec = importlib.util.find_spec("glassllm")
    here = Path(spec.origin).parent if spec and spec.origin else Path("/work/tmp/glassllm/glassllm")
    return here if (here / "weights" / "en.npz").exists() else None


@pytest.mark.skipif(package() is None, reason="glassllm is not installed")
@pytest.mark.parametrize("language", ["en", "pt"])
def test_logits_of_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: str) -> None:
    folder = package()
    assert folder is not None
    monkeypatch.syspath_prepend(str(folder.parent))
    from glassllm.model import GlassLM

    file = folder / "weights" / f"{language}.npz"
    with np.load(file) as data:
        said = json.loads(str(data["__config__"]))
        state = {k: torch.from_numpy(data[k]) for k in data.files if k != "__config__"}
    torch.save(state, tmp_path / "x.pt")
    config: dict[str, Any] = {
        "model_type": "llama", "hidden_size": said["d_model"], "num_hidden_layers": said["n_layers"],
        "num_attention_heads": said["n_heads"], "num_key_value_heads": said["n_kv_heads"], "vocab_size":
        said["vocab_size"], "max_position_embeddings": said["max_len"], "rope_theta": said["rope_base"],
        "rms_norm_eps": said["eps"], "intermediate_size": state["blocks.0.ffn.W1"].shape[1],
        "tie_word_embeddings": True}
    model = arch.describe(config, "glassllm")
    assert model.total() == 852_608
    weights = open_weights(str(tmp_path / "x.pt"), model, TABLE, layout="glassllm")
    assert weights.warnings == ()
    decoder = build(model)
    decoder.assign(weights, dtype=torch.float32)
    ids = np.random.default_rng(0).integers(0, said["vocab_size"], said["max_len"])
    want = torch.from_numpy(GlassLM.load(file).forward(ids).data[0])
    with torch.no_grad():
        got = decoder(torch.from_numpy(ids)[None])[0]
    assert (got - want).abs().max() < 1e-3 * want.abs().max()
    for name in [m for m in sys.modules if m.partition(".")[0] == "glassllm"]:
        monkeypatch.delitem(sys.modules, name)
