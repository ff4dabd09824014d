"""The view of `llamactl reference`: what was recorded, of what, on which tokens; with -v every tensor of the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.recording import RecordingReport
from llamactl.render.document import Block, Column, Document, Facts, Table
from llamactl.render.units import count, size

_LAYERS = {"states": "the stream after every layer", "fingerprints": "RMS and 16 sums of every token after every layer",
           None: "none: --layers"}
_SOURCES = {"passage": "the bundled passage", "ids": "made up, for want of a tokenizer", "text": "of the text",
            "given": "as given"}


def view(reports: Sequence[RecordingReport], *, verbose: bool = False, **_: Any) -> Document:
    """Facts, and the file's tensors where they are asked for."""
    (r,) = reports
    kept = f"{count(r.vocab)} a token" if r.top_k is None else f"{count(r.top_k)} of {count(r.vocab)} a token"
    pairs = [
        ("from", f"{r.id} ({r.layout}, {r.family})"),
        ("to", r.path),
        ("tokens", f"{count(r.tokens)}, {_SOURCES.get(r.tokens_source, r.tokens_source)}"),
        ("logits", f"{kept}, computed in {r.dtype}"),
        ("layers", _LAYERS[r.layers]),
        ("loss", "none: one token" if r.loss is None else f"{r.loss:.4f} nats per token"),
        ("bytes", size(r.file_bytes)),
    ]
    columns = (Column("tensor"), Column("dtype"), Column("shape"), Column("nbytes", "count"))
    rows = tuple((t.name, t.dtype, "x".join(map(str, t.shape)), t.nbytes) for t in r.tensors)
    blocks: list[Block] = [Facts("", tuple(pairs))]
    if verbose:
        digests = (("config", r.config_digest), ("weights' headers", r.weights_digest))
        blocks += [Facts(f"digests ({r.digest})", digests), Table("file", columns, rows)]
    return Document(tuple(blocks), Table("", columns, rows), (r.file_bytes,))
