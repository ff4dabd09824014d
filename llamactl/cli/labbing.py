"""`lab run` at work: open the trained weights, run the experiments one after the other, report."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llamactl.analysis.experiment import Card, LabReport, overall
from llamactl.cli.located import need_torch
from llamactl.cli.memory import enough
from llamactl.cli.options import Access, Output
from llamactl.cli.progress import Words
from llamactl.errors import InputRefused, NotAvailable, UsageError, printable

if TYPE_CHECKING:
    from llamactl.cli.runnable import Opened
    from llamactl.lab._setting import Checkpoint
    from llamactl.source import Resolved
    from llamactl.spec.model import Model

TOKENS = 1024
BYTES = 256
Warnings = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked. steps, threads: None for the default."""

    cards: tuple[Card, ...]
    models: tuple[str, ...]
    text: str | None
    bytes: bool
    seed: int
    steps: int | None
    device: str
    threads: int | None
    report: str | None
    force: bool

    def inputs(self) -> dict[str, Any]:
        """What the JSON says was asked for."""
        return {"action": "run", "names": [c.name for c in self.cards], "model": list(self.models), "text": self.text,
                "bytes": self.bytes, "seed": self.seed, "steps": self.steps, "device": self.device,
                "threads": self.threads}


def run(asked: Asked, out: Output, reach: Access) -> int:
    """Do what is asked and print it; the exit code. Raises LlamactlError."""
    from llamactl.api import Loaded
    from llamactl.atomic import create
    from llamactl.cli.ablating import check_file
    from llamactl.cli.show import show

    if asked.report is not None:
        check_file(os.path.expanduser(asked.report), asked.force)
    check_use(asked)
    need_torch("the lab")
    text = None if asked.text is None else _text(asked.text, learned="text" in _used(asked.cards))
    from llamactl.cli.runnable import open_model
    from llamactl.lab._setting import named

    opened = [open_model(ref, reach) for ref in asked.models]
    where = [os.path.realpath(x.source.path) if x.source.path else x.source.id for x in opened]
    if twice := [ref for n, ref in enumerate(asked.models) if where[n] in where[:n]]:
        raise UsageError("usage", f"the same checkpoint twice: --model {twice[0]}", help="give each once")
    said: Warnings = [w for x in opened for w in x.warnings]
    loaded = [Loaded(model=x.model, source=x.source) for x in opened]
    checkpoints: list[Checkpoint] = []
    for x, id in zip(opened, apart([x.source for x in opened]), strict=True):
        with named(id):
            checkpoints.append(open_checkpoint(asked, x, text, said, id))
    with enough("run fewer experiments, or give smaller weights"), Words(out) as tell:
        report = _measured(asked, tuple(checkpoints), text, tell)
    if asked.report is not None:
        from llamactl.render.labhtml import page

        create(os.path.expanduser(asked.report), page(report).encode("utf-8"), force=asked.force)
    show("lab", loaded, [report], asked.inputs(), out, warnings=dict.fromkeys(said), result=report.to_dict())
    if not (wrong := report.differing):
        return 0
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    print(f"error[lab]: does not hold here: {printable('; '.join(wrong[:3]))}{more}", file=sys.stderr)
    return 1


def _used(cards: Sequence[Card]) -> set[str]:
    """What any of these experiments reads; see lab.uses."""
    from llamactl.lab import uses

    return set().union(*map(uses, cards))


def check_use(asked: Asked) -> None:
    """Refuse an option that nothing of what is asked for reads. Raises UsageError."""
    from llamactl.lab import cards

    used = _used(asked.cards)
    learns = " or ".join(c.name for c in cards() if "text" in _used([c]))
    names = ", ".join(c.name for c in asked.cards)
    if asked.models and "checkpoints" not in used:
        raise UsageError("usage", f"--model: no trained weights are read by {names}", help="leave it out")
    if asked.steps is not None and "steps" not in used:
        raise UsageError("usage", f"--steps is for {learns}, which is not asked for", help=f"add {learns}")
    read = bool(asked.models) and "tokens" in used
    if asked.bytes and "tokens" not in used:
        raise UsageError("usage", f"--bytes: no text is run through checkpoints by {names}", help="leave it out")
    if asked.bytes and not asked.models:
        raise UsageError("usage", "--bytes is for checkpoints, and there is none", help="add --model CKPT")
    if asked.text is not None and not read and "text" not in used:
        if asked.models or "tokens" not in used:
            raise UsageError("usage", f"--text: no text is read by {names}", help=f"leave it out, or add {learns}")
        raise UsageError("usage", f"--text is for {learns} and for checkpoints, and there is neither",
                         help=f"add {learns}, or --model CKPT")
    if asked.force and asked.report is None:
        raise UsageError("usage", "--force is for --report FILE.html, and there is none", help="leave it out")


def _text(file: str, learned: bool) -> str:
    """The text of --text. learned: a network is trained on it, so it may not be too short."""
    from llamactl.cli.prompt import read_prompt
    from llamactl.lab._training import check_text

    text = read_prompt(None, file, False)
    if learned:
        check_text(text.encode(), "standard input" if file == "-" else file)
    return text


def apart(sources: Sequence[Resolved]) -> list[str]:
    """A name for each: its id; of those that share one, as many folders of its path as tell them apart."""
    out = [x.id for x in sources]
    where = [_folders(x) for x in sources]
    for n in range(2, 2 + max(map(len, where), default=0)):
        twice = [i for i, id in enumerate(out) if out.count(id) > 1]
        for i in twice:
            out[i] = "/".join(where[i][-n:])
    return out


def _folders(x: Resolved) -> list[str]:
    """The path that a local model was named by; of the Hub, its revision tells it apart."""
    if x.source == "hub" or x.path is None:
        return [f"{x.id}@{x.revision}" if x.revision else x.id]
    return os.path.abspath(x.folder or x.path).split(os.sep)


def _describe(name: str) -> Model:
    from llamactl.api import load

    return load(f"preset:{name}").model


def _measured(asked: Asked, checkpoints: tuple[Checkpoint, ...], text: str | None, tell: Words) -> LabReport:
    from importlib.metadata import version

    from llamactl import lab
    from llamactl.lab._setting import Setting
    from llamactl.net import device as devices

    if asked.threads is not None:
        devices.use_threads(asked.threads)
    device = devices.find_device(asked.device)
    setting = Setting(describe=_describe, seed=asked.seed, device=device, threads=asked.threads,
                      checkpoints=checkpoints, steps=asked.steps, tell=lambda what: tell(printable(what)),
                      text=lab.excerpt() if text is None else text.encode(),
                      text_name="Hamlet" if asked.text is None else _called(asked.text))
    made = []
    for card in asked.cards:
        tell(card.name)
        made.append(lab.run(card, setting))
    run_on = read_on(checkpoints, asked.text) if "tokens" in _used(asked.cards) else None
    return LabReport(verdict=overall(e.verdict for e in made), seed=asked.seed, device=devices.name_of(device),
                     threads=devices.count_threads(), torch=version("torch"),
                     checkpoints=tuple(c.id for c in checkpoints), text=run_on, experiments=tuple(made))


def read_on(checkpoints: Sequence[Checkpoint], file: str | None) -> str | None:
    """What trained weights are run on: the text, and of each its tokens. None without weights."""
    own = "a passage that comes with llamactl" if file is None else _called(file)
    said = {f"{own}: ": [c for c in checkpoints if c.read], "made-up tokens: ": [c for c in checkpoints if not c.read]}
    return "; ".join(name + ", ".join(f"{len(c.ids):,} tokens of {c.id}" for c in some)
                     for name, some in said.items() if some) or None


def _called(file: str) -> str:
    """The text of --text FILE."""
    return "standard input" if file == "-" else os.path.basename(file)


def open_checkpoint(asked: Asked, opened: Opened, text: str | None, said: Warnings, id: str) -> Checkpoint:
    """The opened weights with the first tokens of a text, as `id`. Adds to `said` where there is no tokenizer."""
    from llamactl import tokens
    from llamactl.cli.running import place
    from llamactl.lab._setting import Checkpoint
    from llamactl.net.decoder import build
    from llamactl.net.generate import check_ids, positions
    from llamactl.verify.probe import probe

    model = opened.model
    build(model)  # refuses what the network does not run, before any experiment has begun
    most = min(x for x in (TOKENS, positions(model), model.context.usable) if x is not None)
    tokenizer: Any = None
    try:
        tokenizer = tokens.open_tokenizer(place(opened), model_type=model.model_type, vocab=model.embed.vocab)
    except NotAvailable as e:
        if asked.bytes and model.embed.vocab == BYTES:
            tokenizer = tokens.byte_tokenizer(vocab=BYTES)
        else:
            more = "; where they are bytes, --bytes says so" if model.embed.vocab == BYTES else ""
            unused = [w for w, given in (("--text", text is not None), ("--bytes", asked.bytes)) if given]
            also = f"; {' and '.join(unused)} cannot be used for it" if unused else ""
            said.append(("no-tokenizer", f"{id}: {e.message}: its tokens are made up, so claims about its loss are "
                         f"skipped{also}{more}"))
    if text is None or tokenizer is None:
        found = probe(model, tokenizer, most)
        ids, read = found.ids[:most], found.source == "passage"
    else:
        ids, read = tokenizer.encode(text)[:most], True
    if len(ids) < 2:
        raise InputRefused("text-short", f"the text has {len(ids)} tokens, and a loss takes two or more", path=id,
                           help="give a longer text with --text")
    check_ids(model, ids)
    return Checkpoint(id=id, model=model, source=opened.weights, ids=tuple(ids), read=read)
