"""MODEL arguments whose weights are here -> a described model and where its files lie; without torch where that can be.

Only pickles need torch: they are read by its restricted unpickler alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from llamactl import arch
from llamactl.cli.options import Access
from llamactl.errors import InputRefused, NotAvailable
from llamactl.source import Resolved, resolve
from llamactl.spec.model import Model

if TYPE_CHECKING:
    from llamactl.checkpoint.files import Files

Notes = tuple[tuple[str, str], ...]
NANOGPT = "ckpt.pt"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
ABSENT = ("no-weights", "weights-format", "shard-missing", "dangling-link")


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A model and its files, none of whose weights is read yet.

    path: the folder or file that holds the weights. layout: hf, lesson, meta, nanogpt or gguf. config: what describes
    the model, in config.json's words (of GGUF with every alias). notes: (code, message) of source and description.
    """

    source: Resolved
    model: Model
    path: str
    layout: str
    config: dict[str, Any]
    notes: Notes = ()

    @property
    def folder(self) -> str:
        """The folder in which tokenizer and other files lie."""
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.path) or "."


def locate(ref: str | None, reach: Access, *, context: int | None = None) -> Located:
    """The model that `ref` names: a folder (Hugging Face, Meta, nanoGPT, or written by hand), a .gguf or weights file,
    or a Hub id whose files are in the local cache; nothing but a config.json is ever downloaded.

    context: positions of a model whose params.json does not say them. Raises LlamactlError; NotAvailable
    weights-not-found for a preset, extra-missing for a pickle without torch.
    """
    path = os.path.expanduser(ref) if ref else "."
    if (file := _nanogpt_file(path)) is not None:
        return _nanogpt(file)
    weights = path if path.endswith(WEIGHTS) and os.path.isfile(path) else None
    config = os.path.join(os.path.dirname(path), "config.json") if weights else None
    found = resolve(config if config and os.path.isfile(config) else ref, offline=reach.offline, hub=reach.hub)
    if found.source == "preset":
        found = _cached(found)
    if found.form == "gguf":
        return _gguf(found)
    where = weights or found.folder or os.path.dirname(found.path or "")
    if found.form == "meta":
        return _meta(found, where, context)
    from llamactl.api import describe

    model = describe(found)
    with absent_here(found, where):
        return Located(source=found, model=model, path=where, layout=_layout(where, model), config=found.config,
                       notes=(*found.notes, *model.notes))


def open_files(at: Located) -> Files:
    """The bytes of the located weights. Raises as the readers do; extra-missing for pickles without torch."""
    from llamactl.checkpoint.files import GgufFiles, SafetensorsFiles

    if at.layout == "gguf":
        return GgufFiles(at.path)
    with absent_here(at.source, at.folder):
        if (weights := _safetensors(at.path, at.layout)) is not None:
            return SafetensorsFiles(weights)
        _check_pickles(at.path)
        need_torch("reading PyTorch files")
        from llamactl.net.weights import open_reader
        from llamactl.net.weights_bytes import PickleFiles

        return PickleFiles(open_reader(at.path, at.model, arch.names(at.model, at.layout), at.layout))


class absent_here:
    """Weights of a Hub id that are not in the cache: NotAvailable, with the command that brings them."""

    def __init__(self, found: Resolved, folder: str) -> None:
        self.found, self.folder = found, folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, e: BaseException | None, trace: object) -> None:
        if self.found.source == "hub" and isinstance(e, InputRefused) and e.code in ABSENT:
            raise NotAvailable("weights-not-found", f"{self.found.id}: its weights are not in the local cache "
                               f"({e.message})", path=self.folder, help=f"run: hf download {self.found.id}") from None


def _safetensors(path: str, layout: str) -> Any:
    """The headers of the safetensors that a loader would open, None where there are only pickles."""
    from llamactl.checkpoint.folder import read_file, read_folder

    if layout == "nanogpt":
        return None
    if layout == "meta":
        folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
        names = os.listdir(folder)
        if any(n.startswith("consolidated.") and n.endswith(".pth") for n in names):
            return None
        single = os.path.join(folder, "consolidated.safetensors")
        return read_file(single) if os.path.lexists(single) else None
    if path.endswith(".safetensors"):
        return read_file(path)
    if not os.path.isdir(path):
        return None
    try:
        return read_folder(path)
    except InputRefused as e:
        if e.code != "weights-format" or not any(n.endswith(WEIGHTS) for n in os.listdir(path)):
            raise
        return None


def _check_pickles(path: str) -> None:
    """Refuse what is no file of torch's before torch is imported, which takes longer than the look."""
    from llamactl.checkpoint.pickles import check_pickle, pickle_files

    if not os.path.isdir(path):
        check_pickle(path)
        return
    ranks = sorted(n for n in os.listdir(path) if n.startswith("consolidated.") and n.endswith(".pth"))
    for file in [os.path.join(path, n) for n in ranks] or pickle_files(path):
        check_pickle(file, inside=path)


def _layout(path: str, model: Model) -> str:
    """hf, or lesson where the family has one and more of its names are stored."""
    if not hasattr(arch.family(model.family), "LESSON"):
        return "hf"
    return likeliest(_names(path), model, ("hf", "lesson"))


def likeliest(held: Iterable[str], model: Model, layouts: tuple[str, ...]) -> str:
    """The layout of which most names are held, under any prefix; the first of equals."""
    from llamactl.spec.naming import stored_tensors
    from llamactl.spec.prefixes import best

    held = list(held)

    hits: dict[str, int] = {}
    for layout in layouts:
        want = {s.name: s for s in stored_tensors(model, arch.names(model, layout))}
        hits[layout] = sum(name in want for name in best(held, want)[1].values())
        if hits[layout] == len(want):
            return layout  # all are there, and no other can have more
    return max(layouts, key=lambda x: hits[x])


def _names(path: str) -> Iterable[str]:
    weights = _safetensors(path, "hf")
    if weights is not None:
        return list(weights.tensors)
    _check_pickles(path)
    need_torch("reading PyTorch files")
    from llamactl.net.weights import stored_names

    return stored_names(path)


def _meta(found: Resolved, where: str, context: int | None) -> Located:
    from llamactl.arch._meta import from_params

    path = found.path or where
    data, rows = found.config, None
    if isinstance(data, dict) and data.get("vocab_size", -1) == -1:
        rows = _vocabulary(where)
    config = from_params(data, path, rows)
    if config.get("max_position_embeddings") is None:
        config["max_position_embeddings"] = context or _written_context(where)
    model = arch.describe(config, path)
    return Located(source=found, model=model, path=where, layout="meta", config=config,
                   notes=(*found.notes, *model.notes, *_scaled_rope(data)))


def _written_context(where: str) -> int | None:
    """The context that the manifest of our own conversion keeps, for params.json has no word for it."""
    from llamactl.checkpoint.disk import check_regular
    from llamactl.checkpoint.exchange import MANIFEST
    from llamactl.spec.config import POSITIONS
    from llamactl.spec.jsontext import read_json

    folder = where if os.path.isdir(where) else os.path.dirname(where) or "."
    path = os.path.join(folder, MANIFEST)
    if not os.path.lexists(path):
        return None
    check_regular(path, inside=folder)
    data = read_json(path)
    context = data.get("context") if isinstance(data, dict) else None
    return context if type(context) is int and 0 < context <= POSITIONS else None


def _vocabulary(where: str) -> int | None:
    """The rows of the output matrix: of all ranks together."""
    folder = where if os.path.isdir(where) else os.path.dirname(where) or "."
    weights = _safetensors(folder, "meta")
    if weights is not None:
        head = weights.tensors.get("output.weight")
        return head.shape[0] if head is not None and head.shape else None
    need_torch("reading PyTorch files")
    from llamactl.net.weights_meta import rows_of

    return rows_of(folder, "output.weight")


def _gguf(found: Resolved) -> Located:
    from llamactl.arch._gguf import config_of_gguf, describe_gguf
    from llamactl.arch._ggufrope import FACTORS, TENSOR, refused, stretched
    from llamactl.checkpoint.files import small_floats
    from llamactl.checkpoint.ggufparts import read_parts

    assert found.path is not None
    header = read_parts(found.path)
    model, names = describe_gguf(header, found.path), {t.name for t in header.tensors}
    other = sorted(n for n in names if n in FACTORS or (n.startswith("blk.") and n.endswith(TENSOR)))
    if other:
        raise refused(found.path, other[0], "holds factors that are not read")
    if TENSOR in names:
        model = stretched(model, small_floats(found.path, TENSOR), found.path)
    return Located(source=found, model=model, path=found.path, layout="gguf",
                   config=config_of_gguf(header, found.path), notes=(*found.notes, *model.notes))


def _nanogpt_file(path: str) -> str | None:
    """The nanoGPT checkpoint that `path` means: the file itself, or ckpt.pt of a folder that says nothing else."""
    if os.path.isdir(path):
        if any(os.path.lexists(os.path.join(path, n)) for n in ("config.json", "params.json")):
            return None
        path = os.path.join(path, NANOGPT)
    beside = os.path.join(os.path.dirname(path), "config.json")
    return path if path.endswith(".pt") and os.path.isfile(path) and not os.path.isfile(beside) else None


def _nanogpt(path: str) -> Located:
    _check_pickles(path)
    need_torch("reading PyTorch files")
    from llamactl.arch._nanogpt import from_model_args
    from llamactl.net.weights_pickle import load_pickle

    data = load_pickle(path)
    if not isinstance(data, dict) or "model_args" not in data:
        raise InputRefused("config-missing-file", "weights alone do not say the architecture", path=path,
                           help="put the model's config.json beside them (a nanoGPT checkpoint holds its model_args)")
    config = from_model_args(data["model_args"], path, data.get("hf_config"))
    model = arch.describe(config, path)
    folder = os.path.dirname(os.path.abspath(path))
    found = Resolved(source="local", id=os.path.basename(folder) or folder, path=path, form="nanogpt", config=config,
                     folder=folder)
    notes: Notes = model.notes
    if "hf_config" not in data:
        notes += (("nanogpt-gelu", "the file does not say which GELU it was trained with; the exact one is used, as "
                   "nanoGPT has it now (its first versions had the tanh form)"),)
    return Located(source=found, model=model, path=path, layout="nanogpt", config=config, notes=notes)


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


def need_torch(what: str = "running a model") -> None:
    """Raise NotAvailable (extra-missing) where torch is not installed."""
    if find_spec("torch") is None:
        raise NotAvailable("extra-missing", f"{what} needs torch, which is not installed",
                           help="pip install 'llamactl[generate]'")


