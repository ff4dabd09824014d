"""What a checkpoint really holds, by header, against what its config says: names, shapes, counts, containers.

    parameters in the files = elements of all weights, packed ones unpacked, without buffers, known leftovers, layers
    that the model does not count, and a head that is tied
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llamactl.analysis.inventory import File, IndexFacts, Inventory
from llamactl.analysis.matching import (
    Match,
    Reshaped,
    StoredWeight,
    expected,
    head_and_embedding,
    match,
)
from llamactl.analysis.quantization import Quantization, containers, quantization_notes, unread_lines, unread_notes
from llamactl.analysis.quantization import agrees as quantization_agrees
from llamactl.spec.model import Model
from llamactl.spec.naming import Rule
from llamactl.spec.prefixes import LEFT_OUT, beyond, grouped

DTYPES = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8", "F8_E5M2": "fp8"}
# Notes that do not make a checkpoint unclean: odd, but nothing in it contradicts anything.
HARMLESS = ("weights-copies", "weights-tied-head", "st-header-start", "index-no-metadata", "gguf-layout")


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeGroup:
    """The tensors of one stored dtype, packed ones as they lie."""

    dtype: str
    tensors: int
    elements: int
    weights_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """config: as described. files: by header; None where a container could not be read. agree: None without both."""

    config: int | None
    files: int | None
    agree: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors that are no parameters of the model, for one reason; names as stored."""

    why: str
    tensors: int
    elements: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputHead:
    """name: of its tensor in this layout. stored: whether it stands there. tied: what the config says, and why."""

    name: str
    stored: bool
    tied: bool
    tied_why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """What `llamactl inspect` says of one checkpoint; the lists are complete.

    family, parameters.config, agrees and head are None without a description. compared: by name, or by block (GGUF).
    agrees: every tensor of the config stands there with its shape and no other does; None where that was not judged
    (not_judged says why). names: how stored names were rewritten to the model's, None for as they are. clean: nothing
    contradicts anything (what --strict asks).
    """

    id: str
    family: str | None
    model_type: str | None
    files: tuple[File, ...]
    index: IndexFacts | None
    copies: tuple[str, ...]
    tensors: int
    elements: int
    weights_bytes: int
    dtypes: tuple[DtypeGroup, ...]
    parameters: Parameters
    compared: str | None
    agrees: bool | None
    not_judged: str | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[Reshaped, ...]
    names: str | None
    head: OutputHead | None
    buffers: Group
    ignored: tuple[Group, ...]
    extra: tuple[Group, ...]
    bookkeeping: tuple[Group, ...]
    quantization: Quantization
    dtype_config: str | None
    dtype_stored: str | None
    clean: bool
    notes: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def inspect(found: Inventory, *, id: str, model: Model | None = None, rules: Sequence[Rule] | None = None,
            ignored: Sequence[tuple[str, str]] = (), notes: Sequence[tuple[str, str]] = ()) -> InspectReport:
    """Compare `found` with `model`.

    rules: the naming table of the files' layout; None for GGUF, whose description was made from the file itself and
    accounts for it block by block. ignored: (pattern, why) of tensors that known tools leave behind. notes: (code,
    message) of what was odd before.
    """
    want = expected(model, rules) if model and rules is not None else {}
    head, table = head_and_embedding(rules) if rules is not None else ("output.weight", "token_embd.weight")
    m = match(found.weights, want)
    leftovers = _leftovers(m.left if want else found.weights, m, ignored)
    skip = {w.name for ws in leftovers.values() for w in ws}
    weights = [w for w in found.weights if w.name not in skip]
    at = {m.of[w.name]: w for w in weights}
    unread, kinds = dict(found.unread), containers(weights)
    if found.quantization and not kinds and not unread and (m.missing or m.reshaped):
        unread[""] = f"the config says {found.quantization}, and no container of it is recognised"
        m = replace(m, missing=(), left=(), reshaped=())
    modules = {n.rpartition(".")[0] for n in unread if n}
    missing = [n for n in m.missing if n not in unread and n.rpartition(".")[0] not in modules]
    left = [w for w in m.left if w.name not in skip and w.name.rpartition(".")[0] not in modules]
    twin = _twin(model, at, head, table)
    left = [w for w in left if w is not twin]
    extra = _extra(model, want, left, m)
    beside = {w.name for _, ws in extra for w in ws}
    left = [w for w in left if w.name not in beside]
    buffers = [w for n, w in at.items() if n in want and want[n].buffer]
    held = None if unread else _held(model, want, weights, buffers, beside, twin)
    total = model.total() if model else None
    faults = bool(missing or left or m.reshaped)
    agrees = None if model is None else False if faults else None if held is None else held == total
    stored_dtype = _plain_dtype(weights)
    dtype = model.dtype if model and rules is not None else None
    said = [*notes, *found.notes, *_named("weights-missing", "missing", missing),
            *_named("weights-unexpected", "not part of this model", [w.stored for w in left]),
            *_named("weights-shape", "shaped otherwise", [shaped(r) for r in m.reshaped]),
            *_head_notes(model, twin, head, missing), *unread_notes(unread),
            *quantization_notes(found.quantization, kinds, unread)]
    if agrees is False and not faults:
        said.append(("parameters-differ", f"{total:,} are described, and the files hold {held:,}"))
    if dtype and stored_dtype and dtype != stored_dtype and not kinds and not unread:
        said.append(("dtype-differs", f"the config says {dtype}, most bytes are {stored_dtype}"))
    return InspectReport(
        id=id, family=model.family if model else None, model_type=model.model_type if model else None,
        files=found.files, index=found.index, copies=found.copies, tensors=len(found.tensors),
        elements=sum(t.elements for t in found.tensors.values()),
        weights_bytes=sum(t.nbytes for t in found.tensors.values()), dtypes=_dtypes(found),
        parameters=Parameters(config=total, files=held, agree=None if None in (total, held) else total == held),
        compared=None if model is None else "block" if rules is None else "name", agrees=agrees,
        not_judged=next(iter(unread_lines(unread)), None), missing=tuple(missing),
        unexpected=tuple(w.stored for w in left), reshaped=m.reshaped, names=m.rule,
        head=OutputHead(name=head or "", stored=head in at or twin is not None, tied=model.tied,
                        tied_why=model.tied_why) if model and head else None,
        buffers=_group("stored, but not trained by gradient", buffers),
        ignored=tuple(_group(why, ws) for why, ws in leftovers.items()),
        extra=tuple(_group(why, ws) for why, ws in extra), bookkeeping=_bookkeeping(found),
        quantization=Quantization(config=found.quantization, found=kinds, unread=tuple(unread_lines(unread)),
                                  agree=quantization_agrees(found.quantization, kinds, unread)),
        dtype_config=dtype, dtype_stored=stored_dtype, clean=not any(code not in HARMLESS for code, _ in said),
        notes=tuple(said),
    )


def _leftovers(left: Iterable[StoredWeight], m: Match, ignored: Sequence[tuple[str, str]]
               ) -> dict[str, list[StoredWeight]]:
    """Weights that a pattern of the family takes, by the reason why they are none."""
    by = {m.of[w.name]: w for w in left}
    return {why: [by[n] for n in names] for why, names in grouped(by, ignored).items()}


def _twin(model: Model | None, at: Mapping[str, StoredWeight], head: str | None, table: str | None
          ) -> StoredWeight | None:
    """The stored head of a model whose head is the embedding: a second copy, if it has the embedding's size."""
    one, other = at.get(head or ""), at.get(table or "")
    return one if model and model.tied and one and other and one.elements == other.elements else None


def _extra(model: Model | None, want: Mapping[str, Any], left: Sequence[StoredWeight], m: Match
           ) -> list[tuple[str, list[StoredWeight]]]:
    """Left-over weights of what the description says it does not count."""
    out: list[tuple[str, list[StoredWeight]]] = []
    for part in model.not_counted if model and want else ():
        for word, prefixes in LEFT_OUT.items():
            if word not in part.what:
                continue
            names = {w.name for w in left if w.name.startswith(prefixes) or m.of[w.name].startswith(prefixes)}
            if word == "multi-token" and model:
                later = set(beyond((m.of[w.name] for w in left), want, model.n_layers))
                names |= {w.name for w in left if m.of[w.name] in later}
            if names:
                out.append((f"{part.what}: {part.why}", [w for w in left if w.name in names]))
    return out


def _held(model: Model | None, want: Mapping[str, Any], weights: Iterable[StoredWeight],
          buffers: Sequence[StoredWeight], beside: set[str], twin: StoredWeight | None) -> int:
    """Parameters by header."""
    apart = beside | {w.name for w in buffers} | ({twin.name} if twin else set())
    held = sum(w.elements for w in weights if w.name not in apart)
    if model and not want:  # GGUF: the description tells how much of the file are buffers
        held -= sum(n * leaf.elements for layer, n in model.distinct_layers() for leaf in layer.leaves()
                    if leaf.kind == "buffer")
    return held


def _dtypes(found: Inventory) -> tuple[DtypeGroup, ...]:
    sums: dict[str, list[int]] = {}
    for t in found.tensors.values():
        at = sums.setdefault(t.dtype, [0, 0, 0])
        for i, n in enumerate((1, t.elements, t.nbytes)):
            at[i] += n
    ordered = sorted(sums.items(), key=lambda item: (-item[1][2], item[0]))
    return tuple(DtypeGroup(dtype=d, tensors=n, elements=e, weights_bytes=b) for d, (n, e, b) in ordered)


def _plain_dtype(weights: Iterable[StoredWeight]) -> str | None:
    """The dtype of most bytes among the weights that are not packed, as one of our names."""
    by: Counter[str] = Counter()
    for w in weights:
        if w.container is None and w.dtype in DTYPES:
            by[DTYPES[w.dtype]] += w.nbytes
    return max(by, key=lambda d: by[d]) if any(by.values()) else None


def _group(why: str, weights: Sequence[StoredWeight]) -> Group:
    return Group(why=why, tensors=len(weights), elements=sum(w.elements for w in weights),
                 names=tuple(w.stored for w in weights))


def _bookkeeping(found: Inventory) -> tuple[Group, ...]:
    by: dict[str, list[str]] = {}
    for name, kind in found.bookkeeping.items():
        by.setdefault(kind, []).append(name)
    return tuple(Group(why=kind, tensors=len(names), elements=sum(found.tensors[n].elements for n in names),
                       names=tuple(names)) for kind, names in by.items())


def _head_notes(model: Model | None, twin: StoredWeight | None, head: str | None, missing: Sequence[str]
                ) -> list[tuple[str, str]]:
    if model and twin:
        return [("weights-tied-head", f"{model.tied_why}, and the files hold {twin.stored} too: counted once; a header "
                 "cannot tell whether the two are equal")]
    if model and list(missing) == [head]:
        return [("weights-head", f"{model.tied_why}, so the model needs {head}, which is not stored: it may be tied")]
    return []


def shaped(r: Reshaped) -> str:
    """`NAME: [102, 64] stored, [101, 64] by the config`."""
    stored = "another number of elements" if r.stored is None else str(list(r.stored))
    return f"{r.name}: {stored} stored, {list(r.config)} by the config"


def _named(code: str, what: str, names: Sequence[str]) -> list[tuple[str, str]]:
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f", and {len(names) - 3:,} more" if len(names) > 3 else "")
    return [(code, f"{len(names):,} tensor{'s' if len(names) > 1 else ''} {what}: {shown}")]
