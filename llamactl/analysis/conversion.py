"""What `convert` planned or did, as a report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of the output. sources: names in the source; how: copy, rows, widen, values or given; ops: in words.

    digest: of its bytes, null where none was taken.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    how: str
    sources: tuple[str, ...]
    ops: tuple[str, ...]
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """One file of the output, in bytes."""

    name: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProof:
    """Logits of the output against those of the source on the same tokens, both computed in fp32.

    KL in nats, source from output. loss_source, loss_output: nats per token of --text, null without it.
    """

    tokens: int
    max_abs_dlogit: float
    max_kl: float
    top1_agreement: float
    loss_source: float | None = None
    loss_output: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How the written files were checked. exact: canonical tensors that are the source's bit for bit, read back.

    cast: those that are the source's rounded to the type asked for, bit for bit. rounded: those that are equal up to
    the rounding of a 1 that the layout adds. changed: those that were meant to change (pooled heads, 8-bit blocks).
    logits: null where they were not computed, and logits_not_run says why.
    """

    exact: int
    cast: int
    rounded: int
    changed: int
    logits: LogitsProof | None = None
    logits_not_run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertReport:
    """A conversion, planned (dry_run) or done. path: the output. copied_bytes: of tensors that stayed as they were.

    ignored: (name in the source, why) of stored tensors that are not carried over. proof: null without one.
    digest: the algorithm of the tensors' digests, null without them.
    """

    id: str
    path: str
    dry_run: bool
    source_layout: str
    target_layout: str
    family: str
    parameters: int
    tensors: tuple[OutputTensor, ...]
    files: tuple[OutputFile, ...]
    total_bytes: int
    copied_bytes: int
    ignored: tuple[tuple[str, str], ...] = ()
    digest: str | None = None
    proof: Proof | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `result`."""
        return asdict(self)
