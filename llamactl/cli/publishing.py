"""A planned conversion written, proven and published in one step."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl import __version__
from llamactl.analysis.conversion import ConvertReport, OutputFile, OutputTensor, Proof
from llamactl.checkpoint.exchange import MANIFEST
from llamactl.checkpoint.folder import REFERENCE
from llamactl.cli.options import Output
from llamactl.cli.progress import Progress

if TYPE_CHECKING:
    from llamactl.checkpoint.staging import Staging
    from llamactl.cli.given import Given
    from llamactl.cli.located import Located
    from llamactl.cli.planning import Conversion
    from llamactl.cli.runnable import Opened
    from llamactl.verify.recorded import About

Notes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A reference of the source that is to lie beside the output, not computed yet. nbytes: of its file."""

    opened: Opened
    tokens: Given
    about: About
    nbytes: int


def check_place(at: Located, target: str, layout: str, force: bool) -> None:
    """Refuse a place that cannot be written, before anything is read for long. Raises as checkpoint.staging.stage."""
    from llamactl.checkpoint.place import Place
    from llamactl.checkpoint.staging import writing

    with writing(target):
        place = Place(target, _single(target, layout))
        place.check_sources(_sources(at))
        place.check_free(force)


def _single(target: str, layout: str) -> str | None:
    return os.path.basename(target) if target.endswith(".gguf") and layout == "gguf" else None


def _sources(at: Located) -> list[str]:
    """What may not be written, nor lie inside the output. A GGUF file's neighbours are other models."""
    return [at.path] if at.layout == "gguf" else [at.path, at.folder]


def recording(made: Conversion) -> Recording:
    """What is to be recorded of the source: all logits on verify's own tokens. Raises LlamactlError."""
    from llamactl.cli.given import given
    from llamactl.cli.recording import about
    from llamactl.cli.runnable import opened
    from llamactl.verify.recording import file_bytes

    found = opened(made.at)
    tokens = given(found, None, None)
    said = about(found, made.at, tokens)
    return Recording(opened=found, tokens=tokens, about=said, nbytes=file_bytes(tokens.ids, said))


def needed(made: Conversion, recording: Recording | None) -> dict[str, int]:
    """Every file that will be written, but the manifest, and its bytes."""
    sizes = {f.name: f.nbytes() for f in made.weights}
    sizes |= {name: len(data) for name, data in made.texts.items()}
    sizes |= {name: os.path.getsize(path) for name, path in made.target.beside.items() if name not in sizes}
    return sizes | ({REFERENCE: recording.nbytes} if recording else {})


def publish(made: Conversion, target: str, out: Output, *, force: bool, digest: bool, proof: bool,
            text: list[int] | None = None, recording: Recording | None = None
            ) -> tuple[dict[str, str], Proof | None, Notes]:
    """Write everything to `target`, which appears whole or not at all: ({file/tensor: digest}, proof, warnings)."""
    from llamactl.checkpoint.disk import open_regular
    from llamactl.checkpoint.emit import Emitter
    from llamactl.checkpoint.staging import stage

    sizes = needed(made, recording)
    single = _single(target, made.target.layout)
    with stage(target, sources=_sources(made.at), need=sum(sizes.values()), force=force, single=single) as staging:
        if recording is not None:  # first: what cannot be run has cost no writing
            _record(made, recording, staging, out)
        with Progress(out, "writing", sum(f.nbytes() for f in made.weights)) as seen:
            emitter = Emitter(made.files, made.values, digest=digest, seen=seen)
            for n, f in enumerate(made.weights, 1):
                seen.what = f"writing file {n} of {len(made.weights)}"
                with staging.create(single or f.name) as file:
                    f.write(file, emitter)
            for name, data in () if single else made.texts.items():
                with staging.create(name) as file:
                    file.write(data)
            for name, path in () if single else made.target.beside.items():
                if name not in made.texts:
                    source, _ = open_regular(path, inside=made.at.folder)
                    with source, staging.create(name) as file:
                        shutil.copyfileobj(source, file, 1 << 20)
            found = None
            if proof:
                from llamactl.cli.proving import prove

                seen.begin("checking", 2 * sum(o.nbytes for o in made.outputs))
                found = prove(made, staging.path, seen, text=text)
        with staging.create(MANIFEST) as file:
            file.write(json.dumps(manifest(made, emitter.digests, found), indent=1).encode())
        staging.publish()
    return emitter.digests, found, tuple(staging.warnings)


def _record(made: Conversion, recording: Recording, staging: Staging, out: Output) -> None:
    """Run the source and write what it answers."""
    from llamactl.cli.recording import compute
    from llamactl.verify.recorded import encode

    recorded, _ = compute(recording.opened, made.at, recording.tokens.ids, recording.about, out,
                          what="recording, of the weights", help="leave --reference out")
    with staging.create(REFERENCE) as file:
        file.writelines(encode(recorded).blocks())


def report(made: Conversion, target: str, digests: dict[str, str], proof: Proof | None, *, dry_run: bool,
           recording: Recording | None = None) -> ConvertReport:
    """What was planned or done."""
    from llamactl.checkpoint.digest import ALGORITHM

    sizes = needed(made, recording)
    return ConvertReport(
        id=made.at.source.id, path=target, dry_run=dry_run, source_layout=made.at.layout,
        target_layout=made.target.layout, family=made.at.model.family, parameters=made.target.model.total(),
        tensors=tuple(_tensors(made, digests)), files=tuple(OutputFile(name=n, nbytes=b) for n, b in sizes.items()),
        total_bytes=sum(sizes.values()), copied_bytes=sum(o.nbytes for o in made.outputs if o.how == "copy"),
        ignored=made.ignored, digest=ALGORITHM if digests else None, proof=proof)


def _tensors(made: Conversion, digests: dict[str, str]) -> Sequence[OutputTensor]:
    return [OutputTensor(name=o.name, file=f.name, dtype=o.dtype, shape=o.shape, nbytes=o.nbytes, how=o.how,
                         sources=tuple(dict.fromkeys(p.name for p in o.sources)), ops=o.ops,
                         digest=digests.get(f.key(o))) for f in made.weights for o in f.outputs]


def manifest(made: Conversion, digests: dict[str, str], proof: Proof | None) -> dict[str, Any]:
    """llamactl-manifest.json: where everything came from, so that anyone can check it again. The same run, the same
    bytes: it holds no time and no place of the output.
    """
    from dataclasses import asdict

    from llamactl.checkpoint.digest import ALGORITHM

    return {
        "format": 1, "tool": {"name": "llamactl", "version": __version__},
        "source": {**made.at.source.to_dict(), "layout": made.at.layout}, "layout": made.target.layout,
        "family": made.target.model.family, "parameters": made.target.model.total(),
        "context": made.target.model.context.usable,
        "digest": ALGORITHM if digests else None,
        "tensors": [asdict(t) for t in _tensors(made, digests)],
        "ignored": [{"name": name, "why": why} for name, why in made.ignored],
        "proof": asdict(proof) if proof else None,
        "values": {"clamped": made.values.clamped, "flushed_to_zero": made.values.flushed} if made.values else None,
    }
