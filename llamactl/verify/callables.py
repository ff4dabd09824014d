"""Somebody's own code as a side: `package.module:name`, a function from ids to logits or a torch module.

The code is imported and run as it stands: whoever names it trusts it.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llamactl.errors import InputRefused, LlamactlError, NotAvailable, UsageError
from llamactl.verify.hooks import Captured, Parts, Recorder
from llamactl.verify.saved import WORDS, are_log_probs, computed_in

__all__ = ["Captured", "Ran", "inside", "load_callable", "looks_callable", "refed", "run_callable"]

Side = nn.Module | Callable[[Tensor], Any]
_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ran:
    """Logits (T, V) in fp32, or fp64 where they came so. blocks: a module's activations. computed_in, log_probs: as in
    saved.Saved. parameters: dtypes of a module's floating-point parameters as they were. notes: (code, message).
    """

    logits: Tensor
    computed_in: str
    log_probs: bool
    blocks: Captured | None = None
    parameters: tuple[str, ...] = ()
    notes: tuple[tuple[str, str], ...] = ()


def looks_callable(text: str) -> bool:
    """Whether `text` has the form package.module:name (and is no Windows path)."""
    return _NAME.fullmatch(text) is not None and len(text.partition(":")[0]) > 1


def load_callable(text: str) -> Side:
    """What `package.module:name` names, imported from sys.path or the current folder: a torch module, a function from
    (1, T) ids to logits, or what a function or class without arguments makes of these.

    Errors: UsageError; NotAvailable callable-not-found; InputRefused candidate-failed where the code itself fails.
    """
    if not looks_callable(text):
        raise UsageError("usage", f"{text!r} is not of the form package.module:name",
                         help="write mypackage.model:load, a function or a torch module")
    path, _, name = text.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # it stays: code may import more when it runs
    found: Any = _imported(path, text)
    for word in name.split("."):
        if not hasattr(found, word):
            near = get_close_matches(word, dir(found), 1)
            raise NotAvailable("callable-not-found", f"{path} has no {name!r}", path=text,
                               help=f"did you mean {near[0]!r}?" if near else "name a function or a torch module")
        found = getattr(found, word)
    if not isinstance(found, nn.Module) and callable(found) and _makes(found):
        with _user_code(text):
            made = found()
        found = made if isinstance(made, nn.Module) or callable(made) else found
    if not callable(found):
        raise InputRefused("candidate-failed", f"{name} is {_kind(found)}, neither a function nor a torch module",
                           path=text, help="name a function that takes ids (1, T) and gives logits, or a module")
    side: Side = found
    return side


def run_callable(side: Side, ids: Tensor, *, label: str = "the candidate", layers: int | None = None,
                 parts: Collection[int] | None = None) -> Ran:
    """The logits of (1, T) ids, in eval mode and fp32; of a module also what flows through its blocks.

    layers: how many blocks are looked for. parts: blocks whose inside is kept (see hooks.Recorder). The module is left
    as it was found. Errors: InputRefused candidate-failed, candidate-shape.
    """
    if not isinstance(side, nn.Module):
        with _user_code(label), torch.no_grad():
            out = side(ids.clone())
        return _ran(_logits(out, ids, label))
    with _prepared(side) as kinds:
        logits, seen = _forward(side, ids, partial(Recorder, side, ids.shape[1], layers=layers, parts=parts), label)
        blocks = seen.captured(logits.shape[-1])
    notes: tuple[tuple[str, str], ...] = ()
    other = [k for k in kinds if k not in ("fp32", "fp64")]
    if other:
        notes += (("module-upcast", f"{label}: upcast from {', '.join(other)} to fp32 for this run"),)
    if blocks is None:
        notes += (("module-blocks", f"{label}: no list of blocks that pass one row a token on to each other: where "
                   "it differs is not looked for"),)
    return _ran(logits, blocks, kinds, notes + (blocks.notes if blocks else ()))


def refed(module: nn.Module, ids: Tensor, inputs: list[Tensor], *, label: str = "the candidate",
          layers: int | None = None) -> list[Tensor]:
    """The output of each block, (T, D) in the order in which they run, when inputs[n] goes into the n-th."""
    return _again(module, ids, inputs, label, layers, ()).outputs


def inside(module: nn.Module, ids: Tensor, inputs: list[Tensor], block: int, *, label: str = "the candidate",
           layers: int | None = None) -> Parts:
    """{path inside it: (input, output)} of the block-th block, when inputs[n] goes into the n-th."""
    return _again(module, ids, inputs, label, layers, (block,)).parts[block]


def _again(module: nn.Module, ids: Tensor, inputs: list[Tensor], label: str, layers: int | None,
           parts: Collection[int]) -> Captured:
    with _prepared(module):
        logits, seen = _forward(module, ids, partial(Recorder, module, ids.shape[1], layers=layers, parts=parts,
                                                     fed=inputs), label)
        found = seen.captured(logits.shape[-1])
    if found is None:
        raise InputRefused("candidate-failed", "no blocks into which another input could go", path=label)
    return found


def _forward(module: nn.Module, ids: Tensor, recorder: Callable[[], Recorder], label: str) -> tuple[Tensor, Recorder]:
    """The module's logits, and what its hooks saw. Where a trainer's module gives the last token alone, as it does
    without targets, it is asked again with them.
    """
    given = ids.to(next((p.device for p in module.parameters()), ids.device)).clone()
    seen = recorder()
    with _user_code(label), torch.no_grad(), seen.on():
        out = module(given)
    found = _tensor(out)
    if found is not None and found.dim() > 1 and found.shape[-2] == 1 < ids.shape[1] and "targets" in _words(module):
        seen = recorder()
        with _user_code(label), torch.no_grad(), seen.on():
            out = module(given, targets=given)
    return _logits(out, ids, label), seen


@contextmanager
def _prepared(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """The module in eval mode with floats of at least 32 bits, and afterwards as it was; the dtypes it had."""
    modes = [(m, m.training) for m in module.modules()]
    slots: list[tuple[Any, Any, Tensor]] = []
    kinds = dict.fromkeys(WORDS.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in module.parameters()
                          if p.is_floating_point())
    try:
        module.eval()
        for p in module.parameters():
            if p.is_floating_point() and p.dtype.itemsize < 4:
                slots.append((p, None, p.data))
                p.data = p.data.float()
        for m in module.modules():
            for name, b in m._buffers.items():
                if b is not None and b.is_floating_point() and b.dtype.itemsize < 4:
                    slots.append((m._buffers, name, b))
                    m._buffers[name] = b.float()
        yield tuple(kinds)
    finally:
        for at, name, was in slots:
            if name is None:
                at.data = was
            else:
                at[name] = was
        for m, mode in modes:
            m.training = mode


@contextmanager
def _user_code(label: str) -> Iterator[None]:
    """What the user's code raises becomes one line; what it prints goes to standard error."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (LlamactlError, MemoryError):
        raise
    except (Exception, SystemExit) as e:
        said = " ".join(str(e).split())[:500]
        raise InputRefused("candidate-failed", f"it failed with {type(e).__name__}{f': {said}' if said else ''}",
                           path=label, help="--debug shows where") from e


def _imported(path: str, text: str) -> Any:
    try:
        with _user_code(text):
            return importlib.import_module(path)
    except InputRefused as e:
        cause = e.__cause__
        if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
            raise
        if path == cause.name or path.startswith(f"{cause.name}."):
            raise NotAvailable("callable-not-found", f"no module {cause.name!r} in the current folder or on Python's "
                               "path", path=text, help="run it where the module lies, or set PYTHONPATH") from None
        raise NotAvailable("callable-not-found", f"it needs {cause.name!r}, which is not installed here", path=text,
                           help=f"install {cause.name.partition('.')[0]} beside llamactl") from None


def _makes(found: Any) -> bool:
    """Whether it can be called without arguments, so that it makes a side and is none itself."""
    if isinstance(found, type):
        return True
    try:
        inspect.signature(found).bind()
    except TypeError:
        return False
    except ValueError:  # built in: no signature
        return False
    return True


def _words(module: nn.Module) -> Mapping[str, Any]:
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}


def _tensor(out: Any) -> Tensor | None:
    """The logits in what somebody's code gives back: .logits, ["logits"], the first of a tuple, a tensor or array."""
    if isinstance(getattr(out, "logits", None), Tensor):
        out = out.logits
    elif isinstance(out, Mapping):
        out = out.get("logits")
    elif isinstance(out, tuple | list) and out and not isinstance(out[0], int | float | list):
        out = out[0]
    if out is not None and not isinstance(out, Tensor) and hasattr(out, "__array_interface__"):
        out = torch.as_tensor(out)
    return out.detach() if isinstance(out, Tensor) else None


def _logits(out: Any, ids: Tensor, label: str) -> Tensor:
    """(T, V) on the CPU. Raises InputRefused candidate-shape."""
    found = _tensor(out)
    if found is None or not found.is_floating_point():
        what = _kind(out) if found is None else f"a tensor of {found.dtype}"
        raise InputRefused("candidate-shape", f"it gave {what}, not logits", path=label,
                           help="return a tensor (1, T, V), a tuple that begins with it, or an object with .logits")
    tokens, shape = ids.shape[1], list(found.shape)
    if found.dim() == 3 and found.shape[0] == 1:
        found = found[0]
    if found.dim() != 2 or len(found) != tokens or not found.numel():
        one = found.dim() == 2 and len(found) == 1
        raise InputRefused("candidate-shape", f"it gave {shape} for {tokens:,} tokens, not (1, {tokens:,}, vocabulary)",
                           path=label, help="give the logits of every token, not of the last alone" if one else
                           "give one row of logits a token")
    return found.cpu()


def _ran(logits: Tensor, blocks: Captured | None = None, kinds: tuple[str, ...] = (),
         notes: tuple[tuple[str, str], ...] = ()) -> Ran:
    said = computed_in(logits)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    log_probs = are_log_probs(wide, 1e-3 if logits.dtype.itemsize > 2 else 3e-2)
    return Ran(logits=wide, computed_in=said, log_probs=log_probs, blocks=blocks, parameters=kinds, notes=notes)


def _kind(value: Any) -> str:
    word = type(value).__name__
    return f"{'an' if word[:1] in 'aeiouAEIOU' else 'a'} {word}"
