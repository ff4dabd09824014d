"""What `verify` found, as a report: the verdict, what explains it, how far apart the logits are, where it begins."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

VERDICTS = ("equal", "same", "explained", "different", "cannot-judge")
PASSED = ("equal", "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """How far the second logits are from the first over `tokens` positions, both (T, V) in fp64; KL in nats.

    max_abs_dlogit: the largest difference of a logit; max_relative: the largest, over tokens, of |difference| / |first|
    (Euclidean, of the rows less their means). kl_position_0: at the first token, which attends to itself alone.
    kl_by_quarter: means over the quarters of the text; kl_by_position: at every token. top5_agreement: the mean share
    of the five likeliest tokens that both have. columns: vocabulary entries in which logits differ beyond the floor,
    columns_of: all of them. loss_first, loss_second: nats per token. non_finite: infinities and NaNs in each.
    A number that does not exist (NaN on either side) is None.
    """

    tokens: int
    max_kl: float | None
    mean_kl: float | None
    max_abs_dlogit: float | None
    max_relative: float | None
    top1_agreement: float | None
    top5_agreement: float | None
    kl_position_0: float | None
    kl_by_quarter: tuple[float | None, ...]
    kl_by_position: tuple[float | None, ...]
    columns: int
    columns_of: int
    first_column: int | None
    loss_first: float | None
    loss_second: float | None
    non_finite: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What arithmetic alone does to these logits: the same weights by a second honest path, in the same run.

    limit: the largest |dlogit| that counts as arithmetic: `times` x max_abs_dlogit, or the backstop if that is more.
    path: the second path, in words. times: the factor.
    """

    path: str
    max_abs_dlogit: float
    max_kl: float
    times: float
    backstop: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """An edit that, made on the right network, gives the wrong one.

    edit: as `--set` and `ablate --edits` take it. scope: "all layers", "layer 15", "model". words: in plain words.
    cause: the line of code that usually does this; fix: what to do. residual: the largest |dlogit| that is left when it
    is made, and residual_kl. limit: what counts as arithmetic in the edited network, which may be noisier. equivalent:
    other edits that leave no more on this text, with what would tell them apart.
    """

    edit: str
    scope: str
    words: str
    cause: str
    fix: str
    residual: float
    residual_kl: float | None
    limit: float | None = None
    equivalent: tuple[str, ...] = ()
    separate: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The first place that differs. where: "embedding", "layer 3 attention", "layer 3", "head"; by the canonical name.

    relative: the largest per-token relative error there, floor: what arithmetic gives at that place. others: further
    places that are wrong on their own, each fed with the right input.
    """

    where: str
    relative: float
    floor: float
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The per-token relative error of one layer's output, fed with the right input; None where it is not finite."""

    layer: int
    relative: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing the inventory noticed. level: error, warning or note; tensor: its stored name, None for the whole."""

    code: str
    level: str
    message: str
    tensor: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What can be said of the files without running the model. dtypes: elements by stored dtype.

    head: "tied", "untied", "tied and stored, equal", "tied and stored, different". norm_mean: (least, median, largest)
    of the means of norm weights, None without any. path: of the checkpoint.
    """

    path: str
    layout: str
    tensors: int
    parameters: int
    dtypes: tuple[tuple[str, int], ...]
    head: str
    norm_mean: tuple[float, float, float] | None
    nan: int
    inf: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two that were compared. kind: checkpoint, recorded, transformers, logits, module, callable."""

    label: str
    kind: str
    ref: str
    family: str | None = None
    layout: str | None = None
    dtype: str | None = None


TEXTS = {"passage": "a passage that comes with llamactl", "ids": "made-up token ids", "text": "the given text",
         "given": "the given ids"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The tokens on which both were run. source: a key of TEXTS."""

    tokens: int
    source: str
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The whole answer. why: the verdict in one sentence. tried: ideas run. limits: what this run could not see."""

    verdict: str
    why: str
    sides: tuple[Side, Side] | None
    probe: Probe | None
    explanations: tuple[Explanation, ...]
    first_difference: Place | None
    layers: tuple[Layer, ...]
    measures: Measures | None
    floor: Floor | None
    inventory: tuple[Inventory, ...]
    limits: tuple[str, ...] = ()
    tried: int = 0

    @property
    def passed(self) -> bool:
        return self.verdict in PASSED

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
