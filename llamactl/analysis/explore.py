"""Everything a page needs to cost every model between two: tables that were filled by costing each of those models.

A page that looks up and multiplies holds no formula that could drift. Each table depends on the few controls in `by`;
that it depends on no other was found out by trying all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from llamactl.analysis.dtypes import named, weights_dtype
from llamactl.analysis.engines import ENGINES
from llamactl.analysis.kvcache import coefficients, kv_cache
from llamactl.analysis.outline import outline
from llamactl.analysis.params import ParamsReport, params
from llamactl.analysis.rotations import Turning, turnings
from llamactl.errors import InputRefused
from llamactl.spec.edits import apply
from llamactl.spec.features import diff, features
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention
from llamactl.spec.switches import SIZE, Choices, between, nearest, share_of, shares, with_share

SHARE = "share"  # the control that says how many query heads share a KV head
WEIGHTS = ("fp32", "bf16", "fp16", "fp8", "int8", "int4")
MOST = 2**53 - 1  # a script's whole numbers are exact up to here
PROOFS = 64  # models for which the page is given finished numbers, to check its own against


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A value for each state of the controls in `by`: their states joined by commas, 1 and 0 for switches."""

    by: tuple[str, ...]
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The models that one set of controls makes. reference, edits: what the command line calls them.

    counts: parameters by component, and sizes. words: features. parts, form: the drawing, as analysis.outline has it.
    cache: coefficients of each group of layers. state_bytes: of one sequence. shares: what SHARE can be; aims: which of
    them is nearest to the start's own sharing, and to the goal's.
    """

    reference: str
    switches: tuple[str, ...]
    edits: tuple[Table, ...]
    counts: dict[str, Table]
    words: dict[str, Table]
    parts: dict[str, Table]
    form: Table
    cache: Table
    state_bytes: Table
    shares: Table
    aims: Table


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchWords:
    """A switch as a page shows it. changes: (feature, before, after) when it is thrown first, at the start's size."""

    key: str
    title: str
    changes: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Finished numbers of one state, to be found again by the page. world: 0 on the way, 1 at the goal."""

    world: int
    on: tuple[str, ...]
    share: int | None
    ctx: int
    batch: int
    dtype: str
    total: int
    weights_bytes: int
    weights_dtype: str
    ffn_share_blocks: float
    kv_cache_bytes: int
    full_heads_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One of the two models as it is published. dtype: of its weights. share: query heads to a KV head, if alike.

    silent: why there are no rotations, None where there are some. notes: warnings of what its numbers leave out.
    """

    id: str
    family: str
    model_type: str
    dtype: str
    share: int | None
    trained: int | None
    usable: int | None
    rotations: tuple[Turning, ...]
    silent: str | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreReport:
    """What a page of `llamactl explore` is made from. dtypes: name -> (elements of a block, its bytes).

    worlds: the way from `start` by edits and, where edits do not lead all the way, the goal itself. rest: what then is
    different still. states: models that were costed for it. definition: of the cache.
    """

    start: End
    goal: End | None
    switches: tuple[SwitchWords, ...]
    rest: tuple[tuple[str, str, str], ...]
    worlds: tuple[World, ...]
    states: int
    dtypes: dict[str, tuple[int, int]]
    cache_dtypes: tuple[str, ...]
    definition: str
    proofs: tuple[Proof, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageReport:
    """What `llamactl explore` says of the page it made. path, url: where it is; None if not written, not served.

    switches: key and title. states: models that were costed for it. rest: (feature, before, after) no switch makes.
    """

    start: str
    goal: str | None
    path: str | None
    url: str | None
    page_bytes: int
    states: int
    switches: tuple[tuple[str, str], ...]
    rest: tuple[tuple[str, str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the names that schema 1 fixes."""
        return asdict(self)


class _State(NamedTuple):
    on: frozenset[str]
    share: int | None


def explore(a: Model, b: Model | None, *, start: str, goal: str | None = None) -> ExploreReport:
    """Cost every model between `a` and `b`; of `a` alone, all numbers of KV heads. start, goal: what to call them.

    Raises InputRefused (too-large).
    """
    for model, name in ((a, start), (b, goal)):
        if model is not None and model.total() > MOST:
            raise InputRefused("too-large", f"{model.total():,} parameters, and a page counts to {MOST:,} exactly",
                               path=name, help="llamactl params and llamactl kv-cache have no such limit")
    choices = between(a, b if b is not None else a)
    keys = tuple(s.key for s in choices.switches)
    reached = b is None or choices.reached()
    way = _costed(choices, keys)
    ends = (a, b if b is not None else a)
    worlds = [_world(way, start, keys, lambda s: choices.edits(s.on, s.share), choices.shares, ends)]
    sets = [way]
    if b is not None and not reached:
        end = {_State(frozenset(), s): _with_share(b, s) for s in shares(b) or (None,)}
        sets.append(end)
        worlds.append(_world(end, str(goal), (), lambda s: _kv(b, s.share), lambda _: shares(b), ends))
    told = tuple(_words(a, choices, s.key, s.title) for s in choices.switches)
    last = choices.model(set(keys), _aims(choices.shares(set(keys)), ends)[1])
    return ExploreReport(
        start=_end(a, start), goal=_end(b, str(goal)) if b is not None else None, switches=told,
        rest=() if b is None or reached else tuple((c.name, c.before, c.after) for c in diff(last, b)) or (
            ("counts", f"{last.total():,}", f"{b.total():,}"),),
        worlds=tuple(worlds), states=sum(map(len, sets)),
        dtypes={n: (d.block, d.block_bytes) for n in (*WEIGHTS, *ENGINES["arch"].dtypes) for d in (named(n),)},
        cache_dtypes=ENGINES["arch"].dtypes, definition=ENGINES["arch"].definition,
        proofs=tuple(p for n, found in enumerate(sets) for p in _proofs(n, found)))


def _costed(choices: Choices, keys: Sequence[str]) -> dict[_State, Model]:
    """Every subset of the switches with every sharing, each built on what it has in common with another."""
    made: dict[tuple[str, ...], Model] = {(): choices.a}

    def build(edits: tuple[str, ...]) -> Model:
        if edits not in made:
            made[edits] = apply(build(edits[:-1]), edits[-1])
        return made[edits]

    out = {}
    for bits in product((False, True), repeat=len(keys)):
        on = frozenset(k for k, bit in zip(keys, bits, strict=True) if bit)
        for share in choices.shares(on) or (None,):
            out[_State(on, share)] = build(tuple(e for _, edits in choices.edits(on, share) for e in edits))
    return out


def _kv(model: Model, share: int | None) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return () if share is None else (("kv", with_share(model, share)),)


def _with_share(model: Model, share: int | None) -> Model:
    for _, edits in _kv(model, share):
        for edit in edits:
            model = apply(model, edit)
    return model


def _aims(options: Sequence[int], ends: Sequence[Model]) -> tuple[int | None, ...]:
    """The sharing of each end where these are possible; where it has none to tell, the other's."""
    near = [nearest(options, end) for end in ends]
    known = next((s for s in (*near, *options) if s is not None), None)
    return tuple(known if s is None else s for s in near)


def _world(states: Mapping[_State, Model], reference: str, keys: tuple[str, ...],
           edits: Callable[[_State], tuple[tuple[str, tuple[str, ...]], ...]],
           sharing: Callable[[frozenset[str]], tuple[int, ...]], ends: tuple[Model, Model]) -> World:
    controls = (*keys, SHARE)
    at = [tuple(str(s.share or "") if k == SHARE else str(int(k in s.on)) for k in controls) for s in states]

    def table(values: Iterable[Any]) -> Table:
        return _table(controls, dict(zip(at, values, strict=True)))

    def tables(rows: Sequence[Mapping[str, Any]]) -> dict[str, Table]:
        return {n: table(row.get(n) for row in rows) for n in dict.fromkeys(n for row in rows for n in row)}

    models = list(states.values())
    forms = [outline(m) for m in models]
    said = [dict(edits(s)) for s in states]
    options = {key[:-1]: sharing(s.on) for key, s in zip(at, states, strict=True)}
    return World(
        reference=reference, switches=keys,
        edits=tuple(table(e.get(k, ()) for e in said) for k in _ordered(said)),
        counts=tables([_counts(m) for m in models]),
        words=tables([{f.name: f.text for f in features(m)} for m in models]),
        parts=tables([o.parts for o in forms]), form=table(replace(o, parts={}) for o in forms),
        cache=table(coefficients(m) for m in models),
        state_bytes=table(kv_cache(m, 1, dtype="bf16").at[0].state_bytes for m in models),
        # not by SHARE itself, which may stand for the size where no sharing is possible at both
        shares=_table(keys, options),
        aims=_table(keys, {key: _aims(found, ends) for key, found in options.items()}))


def _ordered(said: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every switch that edits once, in an order that each state's own edits keep."""
    longest = max(said, key=len, default={})
    return [*longest, *dict.fromkeys(k for one in said for k in one if k not in longest)]


def _counts(model: Model) -> dict[str, Any]:
    p = params(model)
    out: dict[str, Any] = {n: getattr(p, n) for n in ("total", "text_total", "blocks_total", "layers")}
    out |= {"hidden": model.hidden, "vocabulary": model.embed.vocab, "usable": model.context.usable}
    out |= {"active": p.active.all if p.active else None} | dict(_components(p))
    return out


def _components(p: ParamsReport) -> Iterator[tuple[str, int]]:
    """Leaves of the tree of components, which sum to the total, and the feed-forward's own sum."""
    for name, value in asdict(p.components).items():
        if isinstance(value, dict):
            yield from ((f"{name}.{k}", v) for k, v in value.items())
        else:
            yield name, value


def _table(by: tuple[str, ...], rows: Mapping[tuple[str, ...], Any]) -> Table:
    """`rows` by the fewest controls that tell them apart, tried one after the other on all states."""
    for control in by:
        n = by.index(control)
        fewer: dict[tuple[str, ...], Any] = {}
        if all(fewer.setdefault((*key[:n], *key[n + 1:]), value) == value for key, value in rows.items()):
            rows, by = fewer, (*by[:n], *by[n + 1:])
    return Table(by=by, values={",".join(key): value for key, value in rows.items()})


def _words(a: Model, choices: Choices, key: str, title: str) -> SwitchWords:
    """What a switch changes; a size also changes the numbers inside other features, which are not told again."""
    one = choices.model({key}, nearest(choices.shares({key}), a))
    return SwitchWords(key=key, title=title, changes=tuple(
        (c.name, c.before, c.after) for c in diff(a, one) if key != SIZE or c.name in ("layers", "hidden", "context")))


def _end(model: Model, name: str) -> End:
    try:
        found, why = turnings(model), None
    except InputRefused as e:  # a file may keep what is not read
        found, why = (), e.message
    return End(id=name, family=model.family, model_type=model.model_type, dtype=weights_dtype(model, None)[0].name,
               share=share_of(model), trained=model.context.trained, usable=model.context.usable,
               rotations=found, silent=why or (None if found else _still(model)),
               notes=tuple(dict.fromkeys(words for _, words in model.notes)))


def _still(model: Model) -> str:
    """How positions enter where nothing is turned."""
    if model.positions is not None:
        return ("turns nothing: its positions are added at the input, so that no shift of both leaves a score as it "
                "was")
    if any(isinstance(x.attn, Attention) and x.attn.alibi for x, _ in model.distinct_layers()):
        return "turns nothing: each score gets a penalty that grows with the distance (ALiBi)"
    return "turns nothing"


def _proofs(world: int, states: Mapping[_State, Model]) -> Iterator[Proof]:
    """Some states, spread evenly, each at another context, batch and dtype."""
    dtypes = ENGINES["arch"].dtypes
    step = max(1, len(states) // PROOFS) | 1  # odd: an even one would leave the last switches always off
    for n, (s, m) in enumerate(list(states.items())[::step]):
        ctx, batch, dtype, kept = 1 + 4099 * n * n, 1 + n % 7, dtypes[n % len(dtypes)], WEIGHTS[n % len(WEIGHTS)]
        p, at = params(m, dtype=kept), kv_cache(m, ctx, batch=batch, dtype=dtype).at[0]
        yield Proof(world=world, on=tuple(sorted(s.on)), share=s.share, ctx=ctx, batch=batch, dtype=dtype,
                    total=p.total, weights_bytes=p.weights_bytes, weights_dtype=kept,
                    ffn_share_blocks=p.ffn_share_blocks, kv_cache_bytes=at.kv_cache_bytes,
                    full_heads_bytes=at.full_heads_bytes)
