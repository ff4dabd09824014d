"""The saved logits of a port with one mistake, which README.md shows judged: RoPE turns neighbouring pairs.

    python tests/bench/port.py FOLDER OUT.npz [--tokens 512]

transformers' own network of FOLDER in fp32 with the rotation of Meta's files, on the first tokens of verify's passage.
"""

from __future__ import annotations

import argparse
import importlib.resources
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama


def neighbours(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """modeling_llama.apply_rotary_pos_emb on pairs (2j, 2j + 1)."""
    half = cos.shape[-1] // 2
    cos, sin = (x[..., :half].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for x in (cos, sin))

    def turned(x: Any) -> Any:
        return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin

    return turned(q), turned(k)


def main() -> None:
    """Compute and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("out")
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    modeling_llama.apply_rotary_pos_emb = neighbours
    text = importlib.resources.files("llamactl.verify").joinpath("passage.txt").read_text("ascii")
    ids = AutoTokenizer.from_pretrained(args.folder)(text, return_tensors="pt").input_ids[:, : args.tokens]
    model: Any = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32).eval()
    with torch.no_grad():
        np.savez(args.out, logits=model(ids).logits[0].numpy(), tokens=ids[0].numpy())


if __name__ == "__main__":
    main()
