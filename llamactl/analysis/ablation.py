"""What `ablate` reports: the loss of trained weights under each edit, and two changes that must change nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

STATUSES = ("measured", "not-finite", "not-applicable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """One edit. loss: nats per token; change: against the base, percent of it in change_percent.

    kind: edit, or shift where all positions are moved together. standard_error: of the mean of the differences token by
    token, as if these were independent; None for a single one. max_abs_dlogit: the largest difference of a logit.
    bit_equal: all logits are the base's. status: measured | not-finite (`not_finite` tokens have no loss, so the text
    has none) | not-applicable (not run). what: the edit in plain words; note: why it was not run, or what was made of
    the weights. Numbers that are not there: None.
    """

    edit: str
    kind: str = "edit"
    status: str = "measured"
    loss: float | None = None
    change: float | None = None
    change_percent: float | None = None
    standard_error: float | None = None
    max_abs_dlogit: float | None = None
    bit_equal: bool | None = None
    not_finite: int = 0
    what: str | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NormInput:
    """What a norm reads: |mean of a row| / RMS of the row, over the tokens. layer: None for the norm after the last."""

    layer: int | None
    norm: str
    median: float | None
    worst: float | None

    @property
    def at(self) -> str:
        """Its name in the model."""
        return self.norm if self.layer is None else f"layers.{self.layer}.{self.norm}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NormInputs:
    """median, worst: over the norms, of each one's median over the tokens. worst_at: the one that is worst."""

    median: float
    worst: float
    worst_at: str
    norms: tuple[NormInput, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCopy:
    """The same model as MHA, each KV head copied to the query heads that read it; its logits must be the same bits."""

    n_heads: int
    n_kv_heads: int
    params: int
    params_copied: int
    bit_equal: bool
    max_abs_dlogit: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AblateReport:
    """Trained weights under edits, on one text. losses: nats per token, over `predicted` of the `tokens` tokens.

    text: where the tokens are from. dtype: what was computed in. streamed: weights were read layer by layer, not held.
    ablations: the most harmful first, then those without a loss, then those that cannot be made. norms: None where the
    model has none. kv_copy: None where every query head has its own KV head, or none can be copied.
    """

    id: str
    family: str
    model_type: str
    tokens: int
    predicted: int
    text: str
    dtype: str
    streamed: bool
    base_loss: float
    ablations: tuple[Ablation, ...]
    norms: NormInputs | None
    kv_copy: KvCopy | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def _repr_html_(self) -> str:
        from llamactl.render import html

        return html("ablate", [self])


def ranked(rows: Iterable[Ablation]) -> tuple[Ablation, ...]:
    """The largest change first; rows without a loss after all that have one, and those that were not run last."""
    return tuple(sorted(rows, key=lambda r: (STATUSES.index(r.status), 0.0 if r.change is None else -r.change)))


def summary(norms: Iterable[NormInput]) -> NormInputs | None:
    """The medians of all norms as one; None without a number."""
    listed = tuple(norms)
    found = sorted((n.median, -i) for i, n in enumerate(listed) if n.median is not None)
    if not found:
        return None
    middle = (found[len(found) // 2][0] + found[(len(found) - 1) // 2][0]) / 2
    worst = listed[-found[-1][1]]
    return NormInputs(median=middle, worst=found[-1][0], worst_at=worst.at, norms=listed)
