"""Which stored tensor gives which canonical one; everything stored is used, known to be no weight, or named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from llamactl.checkpoint.held import FLOATS, Held
from llamactl.checkpoint.logical import unpack
from llamactl.errors import InputRefused
from llamactl.spec.model import Model
from llamactl.spec.naming import Rule, Stored, stored_tensors
from llamactl.spec.prefixes import LEFT_OUT, best, beyond, grouped

# Left behind by tools of any family, beside what a family's own list says.
ALWAYS = (("*.rotary_emb.inv_freq", "inverse frequencies of the RoPE, computed from its base"),)
SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """at: canonical name -> (how it is stored, the tensor's name in the file). twin: a stored head of a tied model.

    ignored, left_out: name in the file -> why it is no weight, or what the description leaves out that it belongs to.
    strangers: stored, and nothing of the above.
    """

    at: Mapping[str, tuple[Stored, str]]
    warnings: tuple[tuple[str, str], ...] = ()
    twin: str | None = None
    ignored: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    strangers: tuple[str, ...] = ()


def account(path: str, tensors: Mapping[str, Held], model: Model, rules: Sequence[Rule], *, layout: str,
            ignored: Sequence[tuple[str, str]] = (), packed: bool = True, whole: bool = False) -> Account:
    """Match what a checkpoint stores with what `model` needs; one prefix rule renames all stored names at once.

    packed: whether quantised weights stand under safetensors' container names (a GGUF type says it by itself).
    whole: with the sections beside the decoder, which a network leaves alone.
    Errors (InputRefused): weights-quantized, weights-missing, weights-shape, weights-dtype, layout-incomplete.
    """
    if packed:
        _refuse_packed(path, tensors, model)
    try:
        want = {s.name: s for s in stored_tensors(model, rules)}
    except KeyError as e:
        raise InputRefused("layout-incomplete", f"the {layout} layout has no name for {e.args[0]}", path=path,
                           help="give the model as a Hugging Face folder") from None
    _, of = best(list(tensors), want)
    held = {of[n]: n for n in tensors}
    beside = frozenset() if whole else _beside(model)
    missing = [n for n in want if n not in held]
    needed = [n for n in missing if not all(t.template in beside for t in want[n].of)]
    if needed:
        raise _missing(path, needed, len(tensors), model, rules)
    shapes = [f"{n}: {list(tensors[held[n]].shape)} stored, {list(s.shape)} by the config"
              for n, s in want.items() if n in held and tensors[held[n]].shape != s.shape]
    if shapes:
        raise InputRefused("weights-shape", f"{_count(shapes)} shaped otherwise: {listed(shapes)}", path=path,
                           help="the config is of another model than the weights")
    warnings: list[tuple[str, str]] = []
    absent = [n for n in missing if n not in set(needed)]
    if absent:
        warnings.append(("weights-section", f"{_count(absent)} beside the decoder not stored: "
                         f"{listed(absent, 3)}"))
    left = [n for n in held if n not in want]
    twin = _twin(model, rules, held, tensors)
    no_weights = {n: why for why, ns in grouped(left, (*ignored, *ALWAYS)).items() for n in ns}
    left_out = _left_out(model, want, [n for n in left if n not in no_weights])
    strangers = [held[n] for n in left if n not in no_weights and n not in left_out and n != twin]
    if strangers:
        warnings.append(("weights-unexpected", f"not part of this model, and not used: {_count(strangers)}: "
                         f"{listed(strangers)}"))
    at = {t.name: (s, held[n]) for n, s in want.items() if n in held for t in s.of if t.template not in beside}
    _check_types(path, at, tensors, packed)
    return Account(at=at, warnings=tuple(warnings), twin=held[twin] if twin else None,
                   ignored={held[n]: why for n, why in no_weights.items()},
                   left_out={held[n]: why for n, why in left_out.items()}, strangers=tuple(strangers))


def listed(names: Iterable[str], shown: int = SHOWN) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    return ", ".join(names[:shown]) + (f" and {len(names) - shown:,} more" if len(names) > shown else "")


def _count(names: Sequence[str]) -> str:
    return f"{len(names):,} tensor{'s' if len(names) > 1 else ''}"


def _beside(model: Model) -> frozenset[str]:
    """Canonical paths of the sections beside the decoder, which a network does not need."""
    towers = ("vision", "projector", "audio")
    return frozenset(leaf.path for s in model.sections if s.name in towers for leaf in s.leaves)


def _refuse_packed(path: str, tensors: Mapping[str, Held], model: Model) -> None:
    found = unpack(tensors)
    kinds = list(dict.fromkeys(w.container for w in found.weights if w.container))
    if not kinds and not found.unread:
        return
    method = model.quantization or ", ".join(kinds) or next(iter(found.unread.values()))
    example = next((w.stored for w in found.weights if w.container), None) or next(iter(found.unread))
    raise InputRefused("weights-quantized", f"quantised weights ({method}), e.g. {example}; plain F32, F16, BF16 and "
                       "F64 are read", path=path, help="give a checkpoint that is not quantised, or a GGUF file")


def _missing(path: str, names: list[str], stored: int, model: Model, rules: Sequence[Rule]) -> InputRefused:
    head = next((r.stored for r in rules if "head.weight" in r.of), None)
    help = "download the files again; nothing is ever filled in"
    if names == [head]:
        help = f"{model.tied_why}; if the head is the token embedding, set tie_word_embeddings to true in config.json"
    return InputRefused("weights-missing", f"{_count(names)} of the model not among the {stored:,} "
                        f"stored: {listed(names)}", path=path, help=help)


def _twin(model: Model, rules: Sequence[Rule], held: Mapping[str, str], tensors: Mapping[str, Held]) -> str | None:
    """The model's name of a stored head where the head is the embedding: a second copy, if it has its shape."""
    at = {template: r.stored for r in rules for template in r.of}
    head, table = at.get("head.weight", ""), at.get("embed.weight", "")
    if not model.tied or head not in held or table not in held:
        return None
    return head if tensors[held[head]].shape == tensors[held[table]].shape else None


def _left_out(model: Model, want: Mapping[str, Stored], left: Sequence[str]) -> dict[str, str]:
    """Left-over names that belong to what the description says it leaves out: {name: what}."""
    names: dict[str, str] = {}
    for part in model.not_counted:
        for word, prefixes in LEFT_OUT.items():
            if word in part.what:
                names |= {n: part.what for n in left if n.startswith(prefixes)}
                if word == "multi-token":
                    names |= dict.fromkeys(beyond(left, want, model.n_layers), part.what)
    return names


def _check_types(path: str, at: Mapping[str, tuple[Stored, str]], tensors: Mapping[str, Held], packed: bool) -> None:
    wrong = list(dict.fromkeys(f"{n} is {tensors[n].dtype}" for _, n in at.values() if tensors[n].dtype not in FLOATS))
    if wrong and packed:
        raise InputRefused("weights-dtype", f"{_count(wrong)} of no plain float type: {listed(wrong, 3)}; F64, "
                           "F32, F16 and BF16 are read", path=path, help="convert the weights to one of these")
