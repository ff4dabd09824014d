"""`params --weights`: what the files of a local model hold, by header alone, beside what its config says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl.api import Loaded
from llamactl.render.units import count, size

if TYPE_CHECKING:
    from llamactl.analysis.inspect import InspectReport

NAMES = ("files", "tensors", "elements", "weights_bytes", "bytes_by_dtype", "agrees", "missing", "unexpected",
         "reshaped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Weight files by header, as `inspect` reports them in full.

    elements: as stored; packed formats hold several weights in one. agrees is None where a container was not read.
    """

    report: InspectReport

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; the warnings stand in the envelope."""
        from llamactl.analysis.inspect import shaped

        r = self.report
        by = {d.dtype: d.weights_bytes for d in r.dtypes}
        values = (len(r.files), r.tensors, r.elements, r.weights_bytes, by, r.agrees, sorted(r.missing),
                  sorted(r.unexpected), sorted(map(shaped, r.reshaped)))
        return dict(zip(NAMES, values, strict=True))

    def facts(self) -> list[tuple[str, str]]:
        """Label and text, for people."""
        r = self.report
        by = ", ".join(f"{d.dtype} {count(d.weights_bytes)} B" for d in r.dtypes)
        packed = ", ".join(dict.fromkeys(c.kind for c in r.quantization.found))
        yes = f"yes, name by name{f'; {packed} unpacked' if packed else ''}"
        return [("tensors", f"{count(r.tensors)} in {len(r.files)} file{'s' if len(r.files) != 1 else ''}"),
                ("elements", count(r.elements)), ("bytes", size(r.weights_bytes)), ("by dtype", by or "none"),
                ("agrees with the config", {True: yes, False: "no", None: f"not judged: {r.not_judged}"}[r.agrees])]

    @property
    def warnings(self) -> tuple[tuple[str, str], ...]:
        """(code, message), for stderr and the envelope."""
        return self.report.notes


def read_weights(loaded: Loaded) -> Files:
    """The headers of the model's own safetensors files, compared with its description.

    Raises UsageError for a model without a folder; InputRefused as checkpoint.folder does.
    """
    from llamactl.cli.checkpoint import compared

    return Files(report=compared(loaded.source, loaded.model))
