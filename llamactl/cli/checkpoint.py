"""A MODEL's weight files, read by header and compared with its description: for `inspect` and `params --weights`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl.cli.options import Access
from llamactl.errors import InputRefused, UsageError
from llamactl.source import Resolved

if TYPE_CHECKING:
    from llamactl.analysis.inspect import InspectReport
    from llamactl.analysis.inventory import Inventory
    from llamactl.checkpoint.folder import FolderWeights
    from llamactl.spec.model import Model

Notes = tuple[tuple[str, str], ...]
UNKNOWN = ("config-model-type", "config-remote-code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspected:
    """One checkpoint and its report. model: None where nothing describes it. warnings: of the source and the config."""

    source: Resolved
    report: InspectReport
    model: Model | None = None
    warnings: Notes = ()
    edits: tuple[str, ...] = ()


def open_checkpoint(ref: str | None, reach: Access, *, remote: bool = False, alone: bool = False) -> Inspected:
    """Read the headers of the checkpoint that `ref` names: a folder, a .safetensors or .gguf file, remote a Hub id.

    alone: the headers by themselves, for weights without a config or of an architecture that nothing here describes.
    Raises UsageError where the reference has no weights; InputRefused and NotAvailable as the readers do.
    """
    from llamactl.source import resolve

    if remote:
        return _remote(ref, reach, alone)
    path = os.path.expanduser(ref or "")
    if path.endswith(".safetensors") and not os.path.isdir(path):
        return _single(path)
    notes: Notes = ()
    try:
        found = resolve(ref, offline=reach.offline)
    except InputRefused as e:
        if e.code != "config-missing-file" or not os.path.isdir(path):
            raise
        if not alone:
            e.help = "copy the model's config.json beside them, or read them alone with --headers-only"
            raise
        found = Resolved(source="local", id=os.path.basename(os.path.abspath(path)), path=path, folder=path)
        notes = ((e.code, "weights without a config.json: only what the headers say is told"),)
    if found.form == "gguf":
        return _gguf(found)
    if found.folder is None:
        kind = "a preset" if found.source == "preset" else "on the Hub"
        raise UsageError("no-folder", f"{found.id} is {kind}, without weight files on this disk",
                         help="give a folder or a file, or --remote ORG/NAME to read headers over the network")
    from llamactl.checkpoint.folder import FolderWeights, read_folder

    model, why = _described(found, alone) if not notes else (None, ())
    try:
        weights = read_folder(found.folder)
    except InputRefused as e:
        if e.code != "no-weights" or model is None:
            raise
        weights = FolderWeights(path=found.folder, headers=(), tensors={})
        why += ((e.code, "no weight files here; only the config is told"),)
    return _inspected(found, weights, model, notes + why)


def compared(found: Resolved, model: Model | None, notes: Notes = ()) -> InspectReport:
    """The report of a local folder whose model is known."""
    from llamactl.checkpoint.folder import read_folder

    if found.folder is None:
        raise UsageError("no-folder", f"{found.id} is a {found.source}, not a folder with weights",
                         help="--weights needs a local model folder")
    return _inspected(found, read_folder(found.folder), model, notes).report


def _inspected(found: Resolved, weights: FolderWeights, model: Model | None, notes: Notes, *, here: bool = True
               ) -> Inspected:
    """here: the files lie on this disk, so that small data can be read too."""
    from llamactl import arch
    from llamactl.analysis.inspect import inspect

    inventory = _inventory(weights, found.config, here)
    if model is None:
        report = inspect(inventory, id=found.id, notes=notes)
    else:
        report = inspect(inventory, id=found.id, model=model, rules=arch.names(model), notes=notes,
                         ignored=getattr(arch.family(model.family), "IGNORED", ()))
    return Inspected(source=found, report=report, model=model,
                     warnings=(*found.notes, *(model.notes if model else ())))


def _described(found: Resolved, alone: bool) -> tuple[Model | None, Notes]:
    """The description; with `alone`, why there is none."""
    from llamactl.api import describe

    try:
        return describe(found), ()
    except InputRefused as e:
        if not alone:
            if e.code in UNKNOWN:
                e.help = "--headers-only reads the weights without their config"
            raise
        return None, ((e.code, f"{e.message}; only what the headers say is told"),)


def _single(path: str) -> Inspected:
    from llamactl.checkpoint.folder import read_file

    found = Resolved(source="local", id=os.path.basename(path), path=path)
    return _inspected(found, read_file(path), None, ())


def _gguf(found: Resolved) -> Inspected:
    from llamactl.analysis.inspect import inspect
    from llamactl.analysis.inventory import File, Inventory
    from llamactl.arch._gguf import BESIDE, describe_gguf
    from llamactl.checkpoint.ggufparts import all_parts, joined
    from llamactl.checkpoint.logical import LogicalWeight

    assert found.path is not None
    parts = all_parts(found.path)
    header = joined(parts)
    model, notes = None, header.notes
    try:
        model = describe_gguf(header, found.path)
    except InputRefused as e:
        notes += ((e.code, f"{e.message}; only what the header says is told"),)
    weights = {t.name: LogicalWeight(t.name, t.shape, t.elements, t.nbytes, t.type, t.name) for t in header.tensors}
    files = tuple(File(name=os.path.basename(p.path), file_bytes=p.file_bytes, tensors=len(p.tensors)) for p in parts)
    inventory = Inventory(files=files, tensors=weights, weights=tuple(weights.values()))
    beside = [(prefix + kind, why) for kind, why in BESIDE.items() for prefix in ("", "blk.{i}.")]
    beside += [(f"*.{word}", "scales of quantised tensors") for word in ("scale", "input_scale")]
    report = inspect(inventory, id=found.id, model=model, ignored=beside, notes=notes)
    return Inspected(source=found, report=report, model=model,
                     warnings=tuple(n for n in model.notes if n not in notes) if model else ())


def _remote(ref: str | None, reach: Access, alone: bool) -> Inspected:
    from io import BytesIO

    from llamactl.checkpoint.folder import join
    from llamactl.checkpoint.index import read_index
    from llamactl.checkpoint.safetensors import header_from
    from llamactl.source import is_path, resolve
    from llamactl.source.hubweights import SINGLE, fetch_headers, fetch_index

    if ref is None or is_path(ref):
        raise UsageError("hub-id", "--remote needs a Hub id", help="write --remote ORG/NAME or ORG/NAME@REVISION")
    found = resolve(ref if ref.startswith("hf://") else f"hf://{ref}", offline=reach.offline)
    path = fetch_index(found.id, found.revision, offline=reach.offline)
    index = read_index(os.path.dirname(path)) if path else None
    shards = index.shards if index else (SINGLE,)
    heads = fetch_headers(found.id, found.revision, shards, offline=reach.offline)
    headers = [header_from(BytesIO(h.head), h.file_bytes, f"{found.id}/{h.name}") for h in heads]
    weights = join(found.id, headers, index, shards)
    model, why = _described(found, alone)
    return _inspected(found, weights, model, why, here=False)


def _inventory(weights: FolderWeights, config: Any, here: bool) -> Inventory:
    from llamactl.analysis.inventory import File, IndexFacts, Inventory
    from llamactl.checkpoint.logical import unpack
    from llamactl.checkpoint.small import SmallData

    method, words = _quantization(config)
    if here:
        with SmallData(weights) as peek:
            found = unpack(weights.tensors, words, peek=peek)
    else:
        found = unpack(weights.tensors, words)
    index = None
    if (said := weights.index) is not None:
        size = said.total_size if type(said.total_size) is int else None
        index = IndexFacts(
            tensors=len(said.weight_map), total_size=size,
            total_size_agrees=None if said.total_size is None else said.total_size == weights.total_bytes,
            not_listed=tuple(n for n in weights.tensors if n not in said.weight_map),
            not_stored=tuple(n for n in said.weight_map if n not in weights.tensors), not_read=weights.orphans)
    files = tuple(File(name=_short(h.path, weights.path), file_bytes=h.file_bytes, tensors=len(h.tensors))
                  for h in weights.headers)
    return Inventory(files=files, tensors=weights.tensors, weights=found.weights, bookkeeping=found.bookkeeping,
                     unread=found.unread, quantization=method, index=index, copies=weights.copies,
                     notes=weights.warnings)


def _short(path: str, base: str) -> str:
    """A file's name inside its folder or repository."""
    return os.path.basename(path) if path == base else path.removeprefix(base).lstrip("/" + os.sep)


def _quantization(config: Any) -> tuple[str | None, Mapping[str, Any]]:
    """The method that a config names, and all its words; MLX writes them as `quantization`, without a method."""
    nodes = [config, *(config.get(k) for k in ("text_config", "llm_config"))] if isinstance(config, dict) else []
    for node in nodes:
        for key in ("quantization_config", "compression_config", "quantization"):
            words = node.get(key) if isinstance(node, dict) else None
            if isinstance(words, dict):
                method = words.get("quant_method", words.get("quantization_method"))
                if method is None and type(words.get("bits")) is int and "group_size" in words:
                    method = "mlx"
                return str(method or "unnamed"), words
    return None, {}
