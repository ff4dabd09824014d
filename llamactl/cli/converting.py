"""`convert`: plan, write, prove, publish, tell."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from llamactl.cli.located import Located, locate, need_torch
from llamactl.cli.options import Access, Output
from llamactl.cli.planning import Conversion, Notes, plan
from llamactl.cli.targets import Wanted
from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.spec.model import Model

LOSS_TOKENS = 1024  # of --text


def convert(ref: str, path: str, wanted: Wanted, out: Output, reach: Access, *, clamp: bool, tokenizer: bool,
            text: str | None, dry_run: bool, force: bool, proof: bool, digest: bool, reference: bool) -> None:
    """The command: plan, write, prove, publish, tell."""
    from llamactl.cli import publishing
    from llamactl.cli.show import show

    path = os.path.expanduser(path)
    at = locate(ref, reach, context=wanted.context)
    if wanted.context is not None and at.layout != "meta":
        raise UsageError("usage", "--context is for Meta's params.json; this config says it itself")
    if not dry_run:
        publishing.check_place(at, path, wanted.layout, force)
    if reference:
        need_torch("recording a reference")
    ids = None if text is None else _ids(at, text)
    made = plan(at, wanted, clamp=clamp, tokenizer=tokenizer)
    digests: dict[str, str] = {}
    recording = publishing.recording(made) if reference else None
    found, notes = None, made.notes + (recording.tokens.notes if recording else ())
    if not dry_run:
        digests, found, more = publishing.publish(made, path, out, force=force, digest=digest, proof=proof, text=ids,
                                                  recording=recording)
        notes += more
    notes += _changes(made)
    if reference and _narrowed(made):
        notes += (("reference-exact", "the recorded reference is what the source's own values answer: verify counts "
                   "the rounding of the output's as a difference"),)
    report = publishing.report(made, path, digests, found, dry_run=dry_run, recording=recording)
    inputs = {"to": wanted.layout, "dtype": wanted.dtype, "shard_bytes": wanted.shard_bytes,
              "kv_heads": wanted.kv_heads, "tie": wanted.tied, "vocab_pad_to": wanted.vocab, "ranks": wanted.ranks,
              "context": wanted.context, "allow_overflow": clamp, "tokenizer": tokenizer, "dry_run": dry_run,
              "proof": proof, "digest": digest, "force": force, "text": text, "reference": reference}
    loaded: Any = _Loaded(at.source, at.model, notes)
    show("convert", [loaded], [report], inputs, out, result=report.to_dict())


class _Loaded(NamedTuple):
    """What `show` reads of a model."""

    source: Any
    model: Model
    warnings: Notes
    edits: tuple[str, ...] = ()


def _ids(at: Located, file: str) -> list[int]:
    """The first tokens of a text, as many as a loss is measured on."""
    from llamactl.cli.prompt import read_prompt
    from llamactl.tokens import open_tokenizer

    need_torch("measuring a loss")
    try:
        tokenizer = open_tokenizer(at.path if at.layout == "gguf" else at.folder, vocab=at.model.embed.vocab)
    except NotAvailable as e:
        if e.code == "tokenizer-missing":
            e.help = "leave --text out, or put the tokenizer beside the weights"
        raise
    ids = tokenizer.encode(read_prompt(None, file, False) or "")
    room = min(LOSS_TOKENS, at.model.context.usable or LOSS_TOKENS)
    if len(ids) < 2:
        raise InputRefused("text-short", f"{len(ids)} tokens; a loss takes two", path=file)
    return list(ids[:room])


def _narrowed(made: Conversion) -> bool:
    """Whether values went into a type that does not hold all those of their own; quantised ones are fp32."""
    from llamactl.checkpoint.held import FLOATS
    from llamactl.cli.proving import comparable

    pairs = ((p.dtype if p.dtype in FLOATS else "F32", o.dtype) for o in made.outputs for p in o.sources)
    return any(comparable(kind, new) != kind for kind, new in pairs)


def _changes(made: Conversion) -> Notes:
    """What the weights lost, in plain words."""
    notes: Notes = ()
    if any(len(o.terms) > 1 for o in made.outputs):
        notes += (("kv-heads-pooled", "KV heads were averaged in groups: without training on, the model is much worse; "
                   "--text FILE measures by how much"),)
    for what, counts in (("clamped to the largest value of the type", made.values.clamped if made.values else {}),
                         ("rounded to zero", made.values.flushed if made.values else {})):
        if counts:
            first = next(iter(counts))
            more = f" and {len(counts) - 1:,} more tensors" if len(counts) > 1 else ""
            notes += (("convert-values", f"{sum(counts.values()):,} values {what}, in {first}{more}"),)
    return notes
