"""GPT-2's two flags of the attention scale, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from llamactl.cli.options import Access
from llamactl.cli.runnable import open_model
from llamactl.net.decoder import build

CONFIG = {"n_layer": 3, "n_head": 4, "n_embd": 32, "vocab_size": 50, "n_positions": 32, "bos_token_id": 0,
          "eos_token_id": 0}


@pytest.mark.parametrize("flags", [{"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True},
                                   {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}], ids=str)
def test_the_scale_of_the_scores_is_the_configs(tmp_path: Path, flags: dict[str, Any]) -> None:
    import transformers

    made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG, **flags)).eval()
    torch.manual_seed(3)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **CONFIG, **flags}))
    found = open_model(str(tmp_path), Access(offline=True, hub=False))
    net = build(found.model, device="cpu")
    net.assign(found.weights, dtype=torch.float32)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.allclose(net(ids), made(ids).logits, atol=1e-5)
