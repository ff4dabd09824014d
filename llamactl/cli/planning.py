"""The plan of a conversion: from a located source and what is wanted to every byte that will be written, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llamactl import arch
from llamactl.cli.located import Located, need_torch, open_files
from llamactl.cli.targets import Target, Wanted, target
from llamactl.errors import InputRefused, UsageError
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.checkpoint.account import Account
    from llamactl.checkpoint.files import Files
    from llamactl.checkpoint.plan import Output as Tensor
    from llamactl.checkpoint.plan import Side
    from llamactl.checkpoint.weightfiles import WeightFile
    from llamactl.spec.naming import Stored

Notes = tuple[tuple[str, str], ...]
_HALVES = ("BF16", "F16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A planned conversion. texts: files whose bytes are known. ignored: (name in the source, why)."""

    at: Located
    files: Files
    source: Side
    target: Target
    weights: tuple[WeightFile, ...]
    texts: Mapping[str, bytes]
    ignored: tuple[tuple[str, str], ...]
    values: Any = None  # net.values.Values, where something is computed
    notes: Notes = ()

    @property
    def readable(self) -> bool:
        """Whether the output can be read back: pickles need torch for it."""
        from importlib.util import find_spec

        return all(f.kind != "torch" for f in self.weights) or find_spec("torch") is not None

    @property
    def outputs(self) -> list[Tensor]:
        return [o for f in self.weights for o in f.outputs]


def plan(at: Located, wanted: Wanted, *, clamp: bool = False, tokenizer: bool = True) -> Conversion:
    """Everything that will be written, checked: every tensor used once, every value in range. Nothing is written.

    clamp: values beyond the type wanted become its largest. Raises LlamactlError.
    """
    from llamactl.checkpoint.plan import Planner, Side

    files = open_files(at)
    at, found = _accounted(at, files, wanted)
    source = Side(at.model, at.layout, arch.names(at.model, at.layout), found.at)
    model = _changed(at.model, wanted)
    main = _main_type(files, source)
    aim = target(at, model, wanted, wanted.dtype if wanted.dtype in ("BF16", "F16", "F32") else main,
                 tokenizer=tokenizer)
    pick = _Pick(wanted, main)
    rules = arch.names(aim.model, aim.layout)
    planner = Planner(files, source, Side(aim.model, aim.layout, rules), pick)
    weights = aim.files(planner)
    weights, passed = _passed_through(weights, files, found, wanted, at)
    ignored = _ignored(found, passed, planner.taken, at, aim)
    narrow = main if at.layout == "gguf" != wanted.layout and wanted.dtype is None and main in _HALVES else None
    values = _computed(files, weights, clamp, narrow)
    weights = [_narrowed(f, values, narrow) for f in weights]
    if values is not None:
        for o in [o for f in weights for o in f.outputs]:
            values.check(o)
    texts = dict(aim.texts)
    if len(weights) > 1 and weights[0].kind == "safetensors":
        from llamactl.checkpoint.stwrite import INDEX, index

        texts[INDEX] = index([f.outputs for f in weights])
    return Conversion(at=at, files=files, source=source, target=aim, weights=tuple(weights), texts=texts,
                      ignored=ignored, values=values, notes=(*at.notes, *files.warnings, *aim.notes))


def _accounted(at: Located, files: Files, wanted: Wanted) -> tuple[Located, Account]:
    """The source's tensors, all of them known. A stored head beside a tied embedding must be equal, or wanted."""
    from llamactl.checkpoint.account import account, listed

    def look(model: Model) -> Account:
        return account(at.path, files.tensors, model, arch.names(model, at.layout), layout=at.layout,
                       ignored=arch.ignored(model, at.layout), packed=at.layout != "gguf", whole=True)

    found = look(at.model)
    if found.twin is not None and not _same(files, found.twin, found.at["embed.weight"][1]):
        if wanted.tied is not False:
            raise InputRefused("weights-head-differs", f"{at.model.tied_why}, but {found.twin} is stored too and is "
                               "not the token embedding: one of the two would be lost", path=at.path,
                               help="--untie keeps both matrices; or take the head out of the files")
        from llamactl.spec.changes import set_tie

        at = replace(at, model=set_tie(at.model, False))
        found = look(at.model)
    if found.strangers:
        many = f"{len(found.strangers):,} stored tensors are" if len(found.strangers) > 1 else "1 stored tensor is"
        raise InputRefused("weights-unexpected", f"{many} not part of this model: {listed(found.strangers)}",
                           path=at.path, help="the config is of another model than the weights, or the names have a "
                           "foreign prefix")
    if wanted.tied and not at.model.tied:
        head, table = found.at["head.weight"][1], found.at["embed.weight"][1]
        if not _same(files, head, table):
            raise InputRefused("weights-head-differs", f"{head} is not the token embedding {table}: tying them would "
                               "change the model", path=at.path, help="leave --tie out")
    return at, found


def _same(files: Files, one: str, other: str) -> bool:
    """Whether two stored tensors hold the same bytes."""
    a, b = files.tensors[one], files.tensors[other]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    if files.parts(one) is not None:
        return _same_parts(files, one, other)
    with files.view(one) as x, files.view(other) as y:
        return all(x[n : n + (1 << 24)] == y[n : n + (1 << 24)] for n in range(0, len(x), 1 << 24))


def _same_parts(files: Files, one: str, other: str) -> bool:
    """The same of tensors that ranks share, each cut its own way: row by row."""
    from llamactl.checkpoint.digest import Digest
    from llamactl.checkpoint.emit import Emitter
    from llamactl.checkpoint.plan import whole

    def digest(name: str) -> str:
        total = Digest()
        for block in Emitter(files, digest=False).blocks(whole(files, name)):
            total.update(block)
        return total.hexdigest()

    return digest(one) == digest(other)


def _changed(model: Model, wanted: Wanted) -> Model:
    """The model with the heads, vocabulary and tie that are asked for."""
    from llamactl.spec.changes import set_kv_heads, set_tie, set_vocab

    if wanted.kv_heads is not None:
        model = set_kv_heads(model, wanted.kv_heads)
    if wanted.vocab is not None:
        if wanted.vocab < model.embed.vocab:
            raise UsageError("usage", f"--vocab-pad-to {wanted.vocab:,}: the model has {model.embed.vocab:,} rows, "
                             "and none is taken away")
        model = set_vocab(model, wanted.vocab)
    if wanted.tied is not None and wanted.tied != model.tied:
        model = set_tie(model, wanted.tied)
    return model


def _main_type(files: Files, source: Side) -> str:
    """The plain type of most of the weights' bytes; F32 where they are quantised, so that nothing is lost."""
    from llamactl.checkpoint.held import FLOATS

    sums: dict[str, int] = {}
    for name in {file for _, file in source.at.values()}:
        t = files.tensors[name]
        kind = t.dtype if t.dtype in FLOATS else "F32"
        sums[kind] = sums.get(kind, 0) + t.elements
    return max(sums, key=lambda k: sums[k])


class _Pick:
    """The dtype of an output: as asked, else as it is; in GGUF vectors and routers stay in F32, as llama.cpp reads."""

    def __init__(self, wanted: Wanted, main: str) -> None:
        self.wanted, self.main = wanted, main

    def __call__(self, stored: Stored, kinds: Sequence[str]) -> str:
        own = widest(kinds) if kinds else self.main
        if self.wanted.layout == "gguf":
            if _precise(stored):
                return "F32"
            if self.wanted.dtype == "Q8_0":
                return "Q8_0" if stored.shape[-1] % 32 == 0 else "F16"
            return self.wanted.dtype or ("F32" if own == "F64" else own)
        if any(t.kind != "param" for t in stored.of):  # a router's correction and the like
            return own
        return self.wanted.dtype or own


def _precise(stored: Stored) -> bool:
    small = ("pos_embed.weight", "layers.{i}.mlp.router.weight")
    return len(stored.shape) < 2 or any(t.template.endswith(".bias") or t.template in small for t in stored.of)


def widest(kinds: Sequence[str]) -> str:
    """The plain type that holds every value of all of `kinds`; F32 for quantised ones."""
    from llamactl.checkpoint.held import FLOATS

    found = {k if k in FLOATS else "F32" for k in kinds}
    return found.pop() if len(found) == 1 else "F64" if "F64" in found else "F32"


def _passed_through(weights: list[WeightFile], files: Files, found: Account, wanted: Wanted, at: Located
                    ) -> tuple[list[WeightFile], set[str]]:
    """Tensors that the description leaves out go from hf to hf as they are: a prediction layer, a tower."""
    if not found.left_out or (at.layout, wanted.layout) != ("hf", "hf"):
        return weights, set()
    from llamactl.checkpoint.plan import whole
    from llamactl.checkpoint.stwrite import names, shards

    more = [whole(files, name) for name in found.left_out]
    parts = shards([o for f in weights for o in f.outputs] + more, wanted.shard_bytes)
    return ([replace(weights[0], name=n, outputs=tuple(p)) for n, p in zip(names(len(parts)), parts, strict=True)],
            set(found.left_out))


def _ignored(found: Account, passed: set[str], taken: set[str], at: Located, aim: Target
             ) -> tuple[tuple[str, str], ...]:
    """What is stored and not carried over, with the reason. Raises InputRefused for anything without one."""
    out = {**found.ignored, **{n: f"not part of this layout: {why}" for n, why in found.left_out.items()
                               if n not in passed}}
    if found.twin:
        out[found.twin] = "a second copy of the token embedding, equal to it"
    stored = {file: s for s, file in found.at.values()}
    rest = [n for n in stored if n not in taken]
    for name in rest:
        if aim.model.tied and stored[name].of[0].template == "head.weight":
            out[name] = "equal to the token embedding, which is tied to it now"
    lost = [n for n in rest if n not in out]
    if lost:
        from llamactl.checkpoint.account import listed

        raise InputRefused("layout-cannot-say", f"the {aim.layout} layout has no place for {len(lost):,} tensors: "
                           f"{listed(lost)}", path=at.path, help="convert to hf")
    return tuple(sorted(out.items()))


def _computed(files: Files, weights: Sequence[WeightFile], clamp: bool, narrow: str | None) -> Any:
    """What computes outputs, None where all are copied. narrow: a type that F32 vectors may go back to."""
    if not any(o.how == "values" or (narrow and o.dtype == "F32") for f in weights for o in f.outputs):
        return None
    from importlib.util import find_spec

    computed = [o for f in weights for o in f.outputs if o.how == "values"]
    if not clamp and not narrow and find_spec("numpy") is not None and {o.dtype for o in computed} == {"F16"}:
        from llamactl.net.halves import Halves, halved

        if all(map(halved, computed)):
            return Halves(files)
    need_torch("changing values on the way")
    from llamactl.net.values import Values

    return Values(files, clamp=clamp)


def _narrowed(f: WeightFile, values: Any, narrow: str | None) -> WeightFile:
    """Vectors that GGUF keeps in F32 go back into the type of the matrices, where that loses nothing."""
    if narrow is None or values is None:
        return f

    from llamactl.checkpoint.plan import retyped

    def one(o: Tensor) -> Tensor:
        if o.dtype != "F32" or o.how == "given":
            return o
        new = retyped(o, narrow)
        return new if values.exact(new) else o

    return replace(f, outputs=tuple(map(one, f.outputs)))
