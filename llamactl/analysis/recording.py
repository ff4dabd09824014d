"""What `reference` recorded, as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """One tensor of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingReport:
    """A recorded reference. path, file_bytes: of the file. tokens_source: passage, ids (made up), text or given.

    top_k: logits kept of each token, None for all. layers: how the stream after each layer is kept, "states" or
    "fingerprints", None where it is not. dtype: of the arithmetic. loss: nats per token of the tokens themselves, None
    for a single one. digest: the algorithm of config_digest and weights_digest (of the weights' names, types, shapes).
    """

    id: str
    family: str
    model_type: str
    layout: str
    path: str
    file_bytes: int
    tokens: int
    tokens_source: str
    vocab: int
    top_k: int | None
    layers: str | None
    dtype: str
    loss: float | None
    digest: str
    config_digest: str
    weights_digest: str
    tensors: tuple[RecordedTensor, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON of one of `result.models`."""
        return asdict(self)
