"""The side that llamactl does not edit: a checkpoint, saved or recorded logits, somebody's code, transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from llamactl.net.decoder import Source
from llamactl.net.streamed import logits
from llamactl.spec.model import Model
from llamactl.verify.blockwise import Flow
from llamactl.verify.callables import inside, load_callable, refed, run_callable
from llamactl.verify.hf import transformers_side
from llamactl.verify.hooks import Parts
from llamactl.verify.saved import Saved
from llamactl.verify.tensors import Layouts, different

FLOW_BYTES = 1 << 30  # of a checkpoint's own stream that are kept to look at single blocks
Notes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Other:
    """logits (T, V), or of the K largest of each token top: values and columns (T, K).

    computed_in: the narrowest type that holds every logit. kind, ref: for the report. embedded, inputs, outputs: as in
    blockwise.Flow. tensors: those that are not the checkpoint's, by canonical name, where that is known. parts: of a
    module, what went into and came out of the parts of its n-th block;
    refed: what its blocks make of given inputs (T, D).
    """

    kind: str
    ref: str
    logits: Tensor | None
    computed_in: str = "fp32"
    top: tuple[Tensor, Tensor] | None = None
    embedded: Tensor | None = None
    inputs: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor | None, ...] = ()
    log_probs: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    parts: Callable[[int], Parts] | None = None
    refed: Callable[[list[Tensor]], list[Tensor]] | None = None
    notes: Notes = ()

    def flow(self) -> Flow | None:
        """What flowed through its blocks, None where that is not known or not finite."""
        if self.embedded is None or not self.inputs or self.logits is None:
            return None
        return Flow(embedded=self.embedded, inputs=self.inputs, outputs=self.outputs, logits=self.logits)


def of_checkpoint(model: Model, source: Source, ids: Tensor, ref: str, *,
                  progress: Callable[[int, int], None] | None = None) -> Other:
    """Another checkpoint, run here in fp32."""
    kept: list[Tensor] = []
    small = 4 * (model.n_layers + 1) * ids.shape[1] * model.hidden <= FLOW_BYTES

    def keep(n: int, x: Tensor) -> None:
        if small:
            kept.append(x[0])

    found = logits(model, source, ids, hidden=keep, progress=progress)[0]
    return Other(kind="checkpoint", ref=ref, logits=found, embedded=kept[0] if kept else None,
                 inputs=tuple(kept[:-1]), outputs=tuple(kept[1:]))


def of_saved(saved: Saved, model: Model, kind: str, ref: str) -> Other:
    """Saved logits, with what was saved of the stream."""
    hidden = saved.hidden
    whole = len(hidden) > 1 and sorted(hidden) == list(range(len(hidden)))
    outputs: list[Tensor | None] = [hidden[n].float() for n in range(1, len(hidden))] if whole else []
    return Other(kind=kind, ref=ref, logits=saved.logits, computed_in=saved.computed_in,
                 top=None if saved.top is None else saved.top[:2], log_probs=saved.log_probs, notes=saved.notes,
                 embedded=hidden[0].float() if whole else None,
                 inputs=tuple(hidden[n].float() for n in range(len(hidden) - 1)) if whole else (),
                 outputs=tuple(outputs))


def of_callable(text: str, ids: Tensor, model: Model, source: Source, label: str, layouts: Layouts) -> Other:
    """Somebody's function or torch module, as `package.module:name`. layouts: as in tensors.different."""
    return ran(load_callable(text), ids, model, source, ref=text, label=label, layouts=layouts)


def of_transformers(folder: str, ids: Tensor, model: Model, source: Source, layouts: Layouts) -> Other:
    """transformers' own network of a Hugging Face folder."""
    return ran(transformers_side(folder), ids, model, source, ref=folder, label="the reference", layouts=layouts,
               kind="transformers")


def ran(side: nn.Module | Callable[[Tensor], object], ids: Tensor, model: Model, source: Source, *, ref: str,
        label: str, layouts: Layouts, kind: str = "module") -> Other:
    """What a function or a module gives of `ids`; of a module also what flows through it, and which tensors differ."""
    found = run_callable(side, ids, label=label, layers=model.n_layers, parts=())
    blocks = found.blocks
    return Other(kind=kind if isinstance(side, nn.Module) else "callable", ref=ref, logits=found.logits,
                 computed_in=found.computed_in, log_probs=found.log_probs, notes=found.notes,
                 tensors=different(side, model, source, layouts) if isinstance(side, nn.Module) else {},
                 parts=partial(inside, side, ids, blocks.inputs, label=label, layers=model.n_layers)
                 if blocks and isinstance(side, nn.Module) else None,
                 refed=partial(refed, side, ids, label=label, layers=model.n_layers)
                 if blocks and isinstance(side, nn.Module) else None,
                 embedded=blocks.embedded.float() if blocks else None,
                 inputs=tuple(x.float() for x in blocks.inputs) if blocks else (),
                 outputs=tuple(x.float() for x in blocks.outputs) if blocks else ())


def log_softmax(x: Tensor) -> Tensor:
    """Logits as log-probabilities, (T, V) fp32, a few rows at a time."""
    out = torch.empty(x.shape)
    for start in range(0, len(x), 64):
        out[start : start + 64] = x[start : start + 64].float().log_softmax(-1)
    return out
