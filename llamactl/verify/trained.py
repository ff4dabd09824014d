"""Trained tensors in the shapes of an edited model: what can be had without training, and a refusal of the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from llamactl.net.decoder import Source
from llamactl.spec.model import Model
from llamactl.spec.model import Tensor as Named
from llamactl.spec.parts import Attention

_KV = (".attn.k.", ".attn.v.", ".attn.k_norm.")


class NewWeights(Exception):
    """An edit asks for a tensor that nobody trained; str() names it."""


class Trained:
    """What `source` holds for `model`, as `edited` needs it. did: what was made of it, in words.

    Other KV heads are copies or means of neighbours; a bias that was not there is 0, which changes nothing. A tensor
    that `edited` does not name is given as it is. Raises NewWeights for what no rule of these makes.
    """

    def __init__(self, source: Source, model: Model, edited: Model) -> None:
        self._source, self._model, self._edited = source, model, edited
        self._have = {t.name: t for t in model.tensors()}
        self._want = {t.name: t for t in edited.tensors()}
        self.did: dict[str, None] = {}

    def tensor(self, name: str) -> Tensor:
        """The tensor under its canonical name."""
        have, want = self._have.get(name), self._want.get(name)
        if have is None:
            if want is None or not name.endswith(".bias"):
                raise NewWeights(name)
            self.did["biases that are not in the weights are 0"] = None
            return torch.zeros(want.shape)
        if want is None or want.shape == have.shape:
            return self._source.tensor(name)
        heads = self._heads(have, want)
        if heads is None:
            raise NewWeights(f"{name} is {_shape(have)}, not {_shape(want)}")
        return self._regrouped(self._source.tensor(name), *heads)

    def _heads(self, have: Named, want: Named) -> tuple[int, int] | None:
        """(KV heads that are there, that are needed) where a tensor has rows for each, and one divides the other."""
        if have.i < 0 or not any(part in have.name for part in _KV) or have.shape[1:] != want.shape[1:]:
            return None
        a, b = (m.layers[have.i].attn for m in (self._model, self._edited))
        if not isinstance(a, Attention) or not isinstance(b, Attention):
            return None
        old, new = a.n_kv_heads, b.n_kv_heads
        if (a.n_heads, a.head_dim) != (b.n_heads, b.head_dim) or (old % new and new % old):
            return None
        rows = (have.shape[0], want.shape[0])
        return (old, new) if rows == (old * a.head_dim, new * a.head_dim) else None

    def _regrouped(self, value: Tensor, old: int, new: int) -> Tensor:
        rest = value.shape[1:]
        if new > old:
            self.did[f"each KV head is copied {new // old} times"] = None
            return value.reshape(old, -1, *rest).repeat_interleave(new // old, 0).reshape(-1, *rest)
        self.did[f"each KV head is the mean of {old // new}"] = None
        return value.float().reshape(new, old // new, -1, *rest).mean(1).reshape(-1, *rest)


def _shape(t: Named) -> str:
    return "x".join(map(str, t.shape))
