"""MODEL arguments -> a described model and its weights, for the commands that run it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from llamactl import arch
from llamactl.cli.options import Access
from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.source import Resolved, resolve
from llamactl.spec.model import Model

Notes = tuple[tuple[str, str], ...]
NANOGPT = "ckpt.pt"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_ABSENT = ("no-weights", "weights-format", "shard-missing", "dangling-link")


class Tensors(Protocol):
    """Canonical tensors of a checkpoint (net.weights.Weights)."""

    path: str
    layout: str
    warnings: Notes

    def names(self) -> tuple[str, ...]: ...

    def tensor(self, name: str) -> Any: ...

    def dtype(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A model that can be run. warnings: (code, message) of its source, its description and its files."""

    source: Resolved
    model: Model
    weights: Tensors
    warnings: Notes = ()


def open_model(ref: str | None, reach: Access) -> Opened:
    """The model that `ref` names, with its weights accounted for and not yet read.

    ref: a folder (Hugging Face, Meta, nanoGPT, or written by hand), a .gguf or weights file, or a Hub id whose files
    are in the local cache; nothing but a config.json is ever downloaded. Raises LlamactlError; NotAvailable
    weights-not-found for a preset, or a Hub id without weights here.
    """
    path = os.path.expanduser(ref) if ref else "."
    if (file := _nanogpt_file(path)) is not None:
        return _nanogpt(file)
    weights = path if path.endswith(_WEIGHTS) and os.path.isfile(path) else None
    config = os.path.join(os.path.dirname(path), "config.json") if weights else None
    found = resolve(config if config and os.path.isfile(config) else ref, offline=reach.offline, hub=reach.hub)
    if found.source == "preset":
        found = _cached(found)
    need_torch()
    if found.form == "gguf":
        return _gguf(found)
    from llamactl.api import describe

    model = describe(found)
    folder = found.folder or os.path.dirname(found.path or "")
    notes: Notes = ()
    if found.form == "meta":
        notes = _scaled_rope(found.config)
    try:
        layout = "meta" if found.form == "meta" else _layout(weights or folder, model)
        return _opened(found, model, weights or folder, layout, notes)
    except InputRefused as e:
        if found.source != "hub" or e.code not in _ABSENT:
            raise
        raise NotAvailable("weights-not-found", f"{found.id}: its weights are not in the local cache ({e.message})",
                           path=folder, help=f"run: hf download {found.id}") from None


def _opened(found: Resolved, model: Model, path: str, layout: str, notes: Notes = ()) -> Opened:
    from llamactl.net.weights import open_weights

    weights = open_weights(path, model, arch.names(model, layout), layout=layout, ignored=arch.ignored(model, layout))
    return Opened(source=found, model=model, weights=weights,
                  warnings=tuple(dict.fromkeys((*found.notes, *model.notes, *notes, *weights.warnings))))


def _layout(path: str, model: Model) -> str:
    """hf, or lesson where the family has one and more of its names are stored."""
    from llamactl.net.weights import likeliest

    if not hasattr(arch.family(model.family), "LESSON"):
        return "hf"
    return likeliest(path, model, {x: arch.names(model, x) for x in ("hf", "lesson")})


def _gguf(found: Resolved) -> Opened:
    from llamactl.api import describe
    from llamactl.arch._ggufrope import FACTORS, TENSOR, refused, stretched
    from llamactl.checkpoint.ggufparts import read_parts
    from llamactl.net.weights_gguf import small_floats

    assert found.path is not None
    model, names = describe(found), {t.name for t in read_parts(found.path).tensors}
    other = sorted(n for n in names if n in FACTORS or (n.startswith("blk.") and n.endswith(TENSOR)))
    if other:
        raise refused(found.path, other[0], "holds factors that are not read")
    if TENSOR in names:
        model = stretched(model, small_floats(found.path, TENSOR), found.path)
    return _opened(found, model, found.path, "gguf")


def _nanogpt_file(path: str) -> str | None:
    """The nanoGPT checkpoint that `path` means: the file itself, or ckpt.pt of a folder that says nothing else."""
    if os.path.isdir(path):
        if any(os.path.lexists(os.path.join(path, n)) for n in ("config.json", "params.json")):
            return None
        path = os.path.join(path, NANOGPT)
    beside = os.path.join(os.path.dirname(path), "config.json")
    return path if path.endswith(".pt") and os.path.isfile(path) and not os.path.isfile(beside) else None


def _nanogpt(path: str) -> Opened:
    need_torch()
    from llamactl.arch._nanogpt import from_model_args
    from llamactl.net.weights_pickle import load_pickle

    data = load_pickle(path)
    if not isinstance(data, dict) or "model_args" not in data:
        raise InputRefused("config-missing-file", "weights alone do not say the architecture", path=path,
                           help="put the model's config.json beside them (a nanoGPT checkpoint holds its model_args)")
    config = from_model_args(data["model_args"], path)
    model = arch.describe(config, path)
    folder = os.path.dirname(os.path.abspath(path))
    found = Resolved(source="local", id=os.path.basename(folder) or folder, path=path, form="nanogpt", config=config,
                     folder=folder)
    said = ("nanogpt-gelu", "the file does not say which GELU it was trained with; the exact one is used, as nanoGPT "
            "has it now (its first versions had the tanh form)")
    return _opened(found, model, path, "nanogpt", (said,))


def _cached(preset: Resolved) -> Resolved:
    """The Hub model that a preset's id names, from the local cache."""
    if "/" in preset.id:
        try:
            return resolve(f"hf://{preset.id}", offline=True)
        except NotAvailable:
            raise NotAvailable("weights-not-found", f"{preset.id} is bundled as a description without weights, and is "
                               "not in the local cache", help=f"run: hf download {preset.id}, or give a folder"
                               ) from None
    raise NotAvailable("weights-not-found", f"{preset.id} is a preset, a description without weights",
                       help="give a folder or a .gguf file")


def _scaled_rope(config: Any) -> Notes:
    """params.json says that the RoPE is stretched, and not how far."""
    if isinstance(config, dict) and config.get("use_scaled_rope") and "rope_scaling_factor" not in config:
        return (("meta-rope-factor", "params.json asks for the scaled RoPE and does not say its factor: 8 is used, "
                 "that of Llama 3.1; for Llama 3.2 add \"rope_scaling_factor\": 32"),)
    return ()


def need_torch() -> None:
    """Raise NotAvailable (extra-missing) where torch is not installed."""
    if find_spec("torch") is None:
        raise NotAvailable("extra-missing", "running a model needs torch, which is not installed",
                           help="pip install 'llamactl[generate]'")


def model_here(example: str) -> None:
    """Raise UsageError with a command's own example where the current folder holds no model."""
    try:
        if not os.path.isfile(NANOGPT):
            resolve(None)
    except UsageError as e:
        e.help = f"try: {example}"
        raise
