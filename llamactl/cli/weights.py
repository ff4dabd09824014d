"""`params --weights`: what the files of a local model hold, by header alone, beside what its config says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamactl.api import Loaded
from llamactl.errors import UsageError
from llamactl.render.units import count, size


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Weight files by header. agrees: every tensor of the config stands there with its shape, and no other does.

    agrees is None where the files are quantised containers, whose elements are not parameters.
    """

    files: int
    tensors: int
    elements: int
    weights_bytes: int
    bytes_by_dtype: dict[str, int]
    agrees: bool | None
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    reshaped: tuple[str, ...]
    warnings: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the warnings stand in the envelope."""
        names = ("files", "tensors", "elements", "weights_bytes", "bytes_by_dtype", "agrees", "missing", "unexpected",
                 "reshaped")
        return {n: list(v) if isinstance(v := getattr(self, n), tuple) else v for n in names}

    def facts(self) -> list[tuple[str, str]]:
        """Label and text, for people."""
        by = ", ".join(f"{d} {count(n)} B" for d, n in self.bytes_by_dtype.items())
        return [("tensors", f"{count(self.tensors)} in {self.files} file{'s' if self.files != 1 else ''}"),
                ("elements", count(self.elements)), ("bytes", size(self.weights_bytes)), ("by dtype", by or "none"),
                ("agrees with the config", {True: "yes, name by name", False: "no", None: "not judged: quantised"}
                 [self.agrees])]


def read_weights(loaded: Loaded) -> Files:
    """The headers of the model's own safetensors files, compared with its description.

    Raises UsageError for a model without a folder; InputRefused as checkpoint.folder does.
    """
    from llamactl import arch
    from llamactl.checkpoint.folder import read_folder
    from llamactl.spec.naming import stored_tensors

    if loaded.source.folder is None:
        raise UsageError("no-folder", f"{loaded.id} is a {loaded.source.source}, not a folder with weights",
                         help="--weights needs a local model folder")
    found = read_folder(loaded.source.folder)
    there = {name: t.shape for name, t in found.tensors.items()}
    agrees: bool | None = None
    missing: list[str] = []
    extra: list[str] = []
    other: list[str] = []
    if loaded.model.quantization is None:
        said = {s.name: s.shape for s in stored_tensors(loaded.model, arch.names(loaded.model))}
        missing = sorted(n for n in said if n not in there)
        extra = sorted(n for n in there if n not in said)
        other = sorted(f"{n}: {list(there[n])} stored, {list(said[n])} by the config"
                       for n in said if n in there and there[n] != said[n])
        agrees = not (missing or extra or other)
    warnings = [*found.warnings, *_said("weights-missing", "missing", missing),
                *_said("weights-unexpected", "not part of this model", extra),
                *_said("weights-shape", "shaped otherwise", other)]
    return Files(files=len(found.headers), tensors=len(there), elements=found.elements,
                 weights_bytes=found.total_bytes, bytes_by_dtype=found.bytes_by_dtype, agrees=agrees,
                 missing=tuple(missing), unexpected=tuple(extra), reshaped=tuple(other), warnings=tuple(warnings))


def _said(code: str, what: str, names: list[str]) -> list[tuple[str, str]]:
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f", and {len(names) - 3:,} more" if len(names) > 3 else "")
    return [(code, f"{len(names):,} tensor{'s' if len(names) > 1 else ''} {what}: {shown}")]
