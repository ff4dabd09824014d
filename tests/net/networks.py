"""Networks of small models for the tests of the network's mathematics, and transformers' own of the same weights."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from llamactl import arch
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.spec.model import Model
from llamactl.spec.naming import read, stored_tensors

TESTS = Path(__file__).resolve().parents[1]
GOLDEN = TESTS / "golden"
CLOSE = 2e-4  # largest difference of two logits that are the same sums in another order
make_golden: Any = sys.modules["llamactl_tests_make_golden"]


class Held:
    """Canonical tensors as a source of weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One golden at work. ids (1, T) and want (T, vocab) are what transformers said of it."""

    model: Model
    tensors: dict[str, Tensor]
    net: Decoder
    ids: Tensor
    want: Tensor


def config(name: str, **changes: Any) -> dict[str, Any]:
    """A golden's config with some words changed; `...` takes one out."""
    data = {**json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8")), **changes}
    return {k: v for k, v in data.items() if v is not ...}


def theirs(said: Mapping[str, Any]) -> nn.Module:
    """transformers' model of a config, its weights drawn as the goldens' are."""
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "config.json").write_text(json.dumps(said), encoding="utf-8")
        with warnings.catch_warnings():  # Llama 4's vision rotation is complex, and not looked at here
            warnings.filterwarnings("ignore", "Casting complex values")
            out: nn.Module = make_golden.build(Path(tmp))
    return out


def stored(hf: Any) -> dict[str, Tensor]:
    """What save_pretrained writes, under its published names."""
    with tempfile.TemporaryDirectory() as tmp:
        hf.save_pretrained(tmp)
        return {k: v for file in sorted(Path(tmp).glob("*.safetensors")) for k, v in load_file(file).items()}


def canonical(model: Model, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The canonical tensors of a stored state dict, towers left out."""
    out: dict[str, Tensor] = {}
    for s in stored_tensors(model, arch.names(model)):
        if s.of[0].role not in ("vision", "projector"):
            out.update(read(s, state[s.name], model))
    return out


def network(model: Model, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Decoder:
    """The network of `model` with these weights."""
    out = build(model, dtype=dtype)
    out.assign(Held(tensors), dtype=dtype)
    return out


def logits(hf: Any, ids: Tensor) -> Tensor:
    """transformers' (B, T, vocab) fp32 logits."""
    with torch.no_grad():
        out: Tensor = make_golden.decoder(hf)(ids, use_cache=False).logits.float()
    return out


def led(hf: Any, ids: Tensor, *, bias: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Llama's logits with every token at position 0, so that nothing turns; bias (H, T, T) on the scores."""
    t = ids.shape[1]
    later = torch.arange(t)[None] > torch.arange(t)[:, None]
    scores = torch.zeros(1, t, t) if bias is None else bias
    x = hf.model.embed_tokens(ids)
    with torch.no_grad():
        out: Tensor = hf(inputs_embeds=x if added is None else x + added, position_ids=torch.zeros_like(ids),
                         attention_mask=scores.masked_fill(later, -1e30)[None], use_cache=False).logits
    return out


@lru_cache
def golden(name: str) -> Golden:
    """A golden's network. Do not write into its tensors: every test shares them."""
    said = config(name)
    model = arch.describe(said, name)
    tensors = canonical(model, stored(theirs(said)))
    data = json.loads((GOLDEN / name / "logits.json").read_text(encoding="utf-8"))
    return Golden(model=model, tensors=tensors, net=network(model, tensors), ids=torch.tensor([data["ids"]]),
                  want=torch.tensor(data["logits"]))


def pieces(net: Decoder, ids: Tensor, cuts: Sequence[int], *, length: int | None = None, pad: Tensor | None = None,
           dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of `ids` given in pieces over one cache, cut where `cuts` says. length: the cache's, if longer."""
    cache = Cache(net.model, len(ids), length or ids.shape[1], dtype=dtype)
    out, at = [], [0, *sorted(set(cuts)), ids.shape[1]]
    for a, b in zip(at, at[1:], strict=False):
        out.append(net(ids[:, a:b], cache, pad=pad if a == 0 else None))
    return torch.cat(out, 1)


def drawn(model: Model, seed: int = 0) -> dict[str, Tensor]:
    """Random canonical tensors of `model`: matrices of some size, norms near one, the same for the same name."""
    out = {}
    for t in model.tensors():
        noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(seed + sum(t.name.encode())))
        if len(t.shape) > 1:
            out[t.name] = noise * (1.2 / t.shape[-1] ** 0.5)
        else:
            out[t.name] = 0.3 * noise + (1.0 if "norm" in t.name and t.name.endswith("weight") else 0.0)
    return out


def off(ours: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where one is no number."""
    diff = (ours.float() - other.float()).abs().max()
    return float(diff) if torch.isfinite(diff) else float("inf")
