"""`reference` at work: open the checkpoint, choose the tokens, compute, write."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl import __version__
from llamactl.analysis.recording import RecordedTensor, RecordingReport
from llamactl.cli.memory import enough
from llamactl.cli.options import Access, Output
from llamactl.errors import OutputError

if TYPE_CHECKING:
    from llamactl.cli.given import Given
    from llamactl.cli.located import Located
    from llamactl.cli.runnable import Opened
    from llamactl.verify.recorded import About, Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked."""

    ref: str | None
    path: str
    tokens: str | None
    text: str | None
    layers: bool
    top_k: int | None
    force: bool

    def inputs(self) -> dict[str, Any]:
        """What the JSON says was asked for."""
        return {"output": self.path, "tokens": self.tokens, "text": self.text, "layers": self.layers,
                "top_k": self.top_k, "force": self.force}


def run(asked: Asked, out: Output, reach: Access) -> None:
    """Do what is asked, and print it. Raises LlamactlError; nothing half-written stays."""
    from llamactl.api import Loaded
    from llamactl.atomic import create
    from llamactl.cli.located import locate, need_torch
    from llamactl.cli.runnable import opened
    from llamactl.cli.show import show

    path = os.path.expanduser(asked.path)
    need_torch()
    check_free(path, asked.force)
    at = locate(asked.ref, reach)
    model = opened(at)
    from llamactl.cli.given import given
    from llamactl.verify.recorded import encode

    tokens = given(model, asked.tokens, asked.text)
    check_space(path, 4 * len(tokens.ids) * min(model.model.head.vocab, asked.top_k or model.model.head.vocab))
    recorded, loss = compute(model, at, tokens.ids, about(model, at, tokens), out, what="computing, of the weights",
                             help="give fewer with --tokens", layers=asked.layers, top_k=asked.top_k)
    file = encode(recorded)
    check_space(path, file.nbytes)
    create(path, file.blocks(), force=asked.force)
    report = _report(asked, model, recorded, loss, file.nbytes, file.entries)
    loaded = Loaded(model=model.model, source=model.source)
    show("reference", [loaded], [report], asked.inputs(), out, warnings=(*model.warnings, *tokens.notes))


def check_free(path: str, force: bool) -> None:
    """Refuse, before any work, a file that may not be written. Raises OutputError."""
    from llamactl.verify.recorded import is_recorded

    parent = os.path.dirname(path) or "."
    if not os.path.isdir(parent):
        raise OutputError("output-parent", f"no such folder: {parent}", path=path, help="make it first")
    if not os.path.lexists(path):
        return
    if os.path.isdir(path):
        raise OutputError("is-a-folder", "is a folder", path=path, help="name a file in it")
    ours = is_recorded(path)
    if not force:
        raise OutputError("exists", "is there already", path=path,
                          help="--force replaces it" if ours else "name another file")
    if not ours:
        raise OutputError("output-foreign", "is no recorded reference, so it is not replaced", path=path,
                          help="name another file")


def check_space(path: str, need: int) -> None:
    """Refuse what cannot fit, with both numbers. Raises OutputError no-space."""
    from llamactl.checkpoint.place import Place
    from llamactl.checkpoint.staging import writing

    with writing(path):
        Place(path, None).check_space(need)


def about(opened: Opened, at: Located, tokens: Given) -> About:
    """Where a reference comes from, as it is written into its file."""
    from llamactl.cli.located import open_files
    from llamactl.verify.recorded import About, config_digest, weights_digest

    return About(version=__version__, id=opened.source.id, family=opened.model.family, layout=opened.weights.layout,
                 computed_in="fp32", source=tokens.source, config_digest=config_digest(at.config),
                 weights_digest=weights_digest(open_files(at)), vocab=opened.model.head.vocab)


def compute(opened: Opened, at: Located, ids: list[int], about: About, out: Output, *, what: str, help: str,
            layers: bool = False, top_k: int | None = None) -> tuple[Recorded, float | None]:
    """The reference and the loss on its tokens, with progress. help: what to do where memory runs out."""
    from llamactl.cli.located import open_files
    from llamactl.cli.progress import Progress
    from llamactl.verify.recording import record

    total = sum(t.nbytes for t in open_files(at).tensors.values())
    with enough(help, f"out of memory with {len(ids):,} tokens"), Progress(out, what, total) as seen:
        return record(opened.model, opened.weights, ids, about, layers=layers, top_k=top_k,
                      progress=lambda n, of: seen(total * n // of - total * (n - 1) // of))


def _report(asked: Asked, opened: Opened, r: Recorded, loss: float | None, nbytes: int, entries: Any
            ) -> RecordingReport:
    from llamactl.checkpoint.digest import ALGORITHM

    layers = "states" if r.hidden is not None else "fingerprints" if r.rms is not None else None
    return RecordingReport(
        id=opened.source.id, family=opened.model.family, model_type=opened.model.model_type, layout=r.about.layout,
        path=asked.path, file_bytes=nbytes, tokens=len(r.ids), tokens_source=r.about.source, vocab=r.about.vocab,
        top_k=None if r.top is None else r.top[0].shape[-1], layers=layers, dtype=r.about.computed_in, loss=loss,
        digest=ALGORITHM, config_digest=r.about.config_digest, weights_digest=r.about.weights_digest,
        tensors=tuple(RecordedTensor(name=n, dtype=d, shape=s, nbytes=b) for n, d, s, b in entries))
