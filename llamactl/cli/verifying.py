"""`verify` at work: open what is named, take the inventory, run both sides, judge, and print."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from llamactl import arch
from llamactl.analysis.verification import Inventory, Probe, Side, VerifyReport
from llamactl.cli.located import Located, locate, need_torch, open_files
from llamactl.cli.memory import enough
from llamactl.cli.options import Access, Output
from llamactl.cli.progress import Progress, Words
from llamactl.errors import InputRefused, LlamactlError, NotAvailable, UsageError, printable

if TYPE_CHECKING:
    from llamactl.cli.given import Given
    from llamactl.cli.runnable import Opened
    from llamactl.verify.other import Other

EXITS = {"equal": 0, "same": 0, "explained": 1, "different": 1, "cannot-judge": 4}
SAVED = (".npy", ".npz")
TRANSFORMERS = "transformers"
HALVES = ("bf16", "fp16")
SECONDS = 540  # of one diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line, checked."""

    ref: str | None
    reference: str | None
    candidate: str | None
    tokens: str | None
    text: str | None
    selftest: bool
    explain: bool
    sweep: bool
    seconds: int | None
    accept: tuple[str, ...]
    report: str | None
    junit: str | None
    annotate: bool
    force: bool

    def inputs(self) -> dict[str, Any]:
        """What the JSON says was asked for."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if k not in (
            "report", "junit", "annotate", "force")}


def run(asked: Asked, out: Output, reach: Access) -> int:
    """Do what is asked and print it; the exit code. Raises LlamactlError, of running out of memory too."""
    need_torch("verifying a model")
    with enough("give fewer tokens with --tokens or a shorter --text"):
        return _run(asked, out, reach)


def _run(asked: Asked, out: Output, reach: Access) -> int:
    at = locate(asked.ref, reach)
    if asked.selftest:
        from llamactl.cli.selftesting import run as selftest

        return selftest(at, asked, out)
    for edit in asked.accept:
        from llamactl.spec.edits import apply

        apply(at.model, edit)
    from llamactl.cli.runnable import opened

    first = opened(at)
    report, warnings = None, list(first.warnings)
    inventory = (take_inventory(at, out),)
    jobs = [(False, asked.reference)] * (asked.reference is not None or asked.candidate is None)
    jobs += [(True, asked.candidate)] * (asked.candidate is not None)
    for candidate, ref in jobs:
        report, said = _judged(asked, at, first, inventory, ref, candidate, out, reach)
        report = _broken(report)
        warnings += said
        if not report.passed:
            break
    assert report is not None
    return _say(asked, first, report, warnings, out)


def _judged(asked: Asked, at: Located, opened_: Opened, inventory: tuple[Inventory, ...], ref: str | None,
            candidate: bool, out: Output, reach: Access) -> tuple[VerifyReport, list[tuple[str, str]]]:
    """One comparison: the candidate with the checkpoint, or the checkpoint with the reference."""
    from llamactl.cli.runnable import opened
    from llamactl.verify.compared import Setting, compared, run_here

    kind, ref = _kind(ref, at, candidate)
    if kind == "none":
        return _inventory_alone(at, inventory), []
    second = None
    saved: Any = None
    if kind == "checkpoint":
        assert ref is not None
        there = locate(ref, reach)
        second = opened(there)
        inventory += (take_inventory(there, out),)
    elif kind in ("logits", "recorded"):
        from llamactl.verify.saved import read_saved

        assert ref is not None
        saved = read_saved(ref, vocab=opened_.model.head.vocab)
    given, notes = _tokens(asked, opened_, saved)
    # The network that is edited is the right one where there is one to run, else the checkpoint.
    right = second if second is not None and not candidate else opened_
    wrong = opened_ if right is second else second
    for each in (right, wrong):
        if each is not None:
            from llamactl.net.generate import check_ids

            check_ids(each.model, given.ids)
    ids, ours = run_here(right.model, right.weights, given.ids, _steps(out, "running the network"))
    other = _other(kind, ref, right, at, wrong, saved, ids, candidate, out)
    labels = ("the checkpoint", "the candidate") if candidate else ("the reference", "the checkpoint")
    sides = _sides(labels, at, opened_, other.kind, ref, second)
    reverse = not candidate and second is None
    setting = Setting(subject=labels[1], by=labels[0], reverse=reverse, seconds=asked.seconds or SECONDS,
                      sweep=asked.sweep, explain=asked.explain, windows=given.source == "given",
                      rounded=opened_.model.dtype if kind == "recorded" and opened_.model.dtype in HALVES else None)
    with Words(out) as say:
        report = compared(right.model, right.weights, ids, ours, other, sides,
                          Probe(tokens=len(given.ids), source=given.source, note=notes[0][1] if notes else None),
                          setting, inventory, say)
    return report, [*notes, *given.notes, *(second.warnings if second else ())]


def _kind(ref: str | None, at: Located, candidate: bool) -> tuple[str, str | None]:
    """What a reference or a candidate is, and where: checkpoint, recorded, logits, module, transformers or none."""
    from llamactl.verify.callables import looks_callable
    from llamactl.verify.recorded import NAME, is_recorded

    if ref is None:
        beside = os.path.join(at.folder, NAME)
        if os.path.lexists(beside):
            return "recorded", beside
        from importlib.util import find_spec

        able = at.layout == "hf" and os.path.isdir(at.path) and find_spec("transformers") is not None
        return (TRANSFORMERS, at.path) if able else ("none", None)
    if ref == TRANSFORMERS and not os.path.exists(ref):
        if candidate or at.layout != "hf" or not os.path.isdir(at.path):
            raise UsageError("usage", "transformers reads Hugging Face folders: it can be the reference of one",
                             help="convert the checkpoint first: llamactl convert ./my-model ./my-model-hf")
        return TRANSFORMERS, at.path
    path = os.path.expanduser(ref)
    if os.path.isfile(path) and (path.lower().endswith(SAVED) or (path.endswith(".safetensors") and (
            is_recorded(path) or _holds_logits(path)))):
        return ("recorded" if path.endswith(".safetensors") and is_recorded(path) else "logits"), path
    if path.lower().endswith(SAVED):
        raise NotAvailable("not-found", "no such file", path=path)
    if not os.path.exists(path) and looks_callable(ref):
        return "module", ref
    return "checkpoint", ref


def _holds_logits(path: str) -> bool:
    """Whether a safetensors file holds logits rather than a model: few tensors, by the names that saved.py knows."""
    from llamactl.checkpoint.folder import read_file

    names = read_file(path).tensors
    return len(names) == 1 or bool({"logits", "output", "lm_logits"} & set(names))


def _tokens(asked: Asked, opened_: Opened, saved: Any) -> tuple[Given, list[tuple[str, str]]]:
    """The tokens of both sides: those that were given, else those that lie with the logits, else verify's probe."""
    from llamactl.cli.given import Given, given

    mine = saved.ids.tolist() if saved is not None and saved.ids is not None else None
    rows = None if saved is None else len(saved.logits if saved.logits is not None else saved.top[0])
    if mine is not None and asked.tokens is None and asked.text is None:
        return Given(ids=mine, source="given"), []
    found = given(opened_, asked.tokens, asked.text)
    if mine is not None and found.ids[: len(mine)] != mine:
        raise UsageError("tokens-differ", f"the logits were computed on {len(mine):,} other tokens",
                         help="leave out --tokens: the file says them")
    if rows is None or rows == len(found.ids):
        return found, []
    if rows > len(found.ids):
        raise InputRefused("tokens-differ", f"{rows:,} rows of logits for {len(found.ids):,} tokens", path=saved.path,
                           help="give the tokens they were computed on with --tokens")
    note = ("tokens-cut", f"logits for {rows:,} tokens: the first {rows:,} of {len(found.ids):,} are compared")
    return replace(found, ids=found.ids[:rows]), [note]


def _broken(report: VerifyReport) -> VerifyReport:
    """Weights that are no numbers fail, though no token of the text may have met them."""
    wrong = [(i, f) for i in report.inventory for f in i.findings if f.level == "error"]
    if not wrong or not report.passed:
        return report
    held, f = wrong[0]
    return replace(report, verdict="different", why=f"{held.path}: {f.tensor or 'weights'}: {f.message}; the logits of "
                   "these tokens agree all the same")


def _layouts(at: Located) -> list[tuple[str, Any, Any]]:
    """The names under which a torch module may keep the model's tensors."""
    out = []
    for layout in ("hf", "lesson", "nanogpt", "meta"):
        try:
            out.append((layout, arch.names(at.model, layout), arch.ignored(at.model, layout)))
        except LlamactlError:
            continue
    return out


def _other(kind: str, ref: str | None, right: Opened, at: Located, wrong: Opened | None, saved: Any, ids: Any,
           candidate: bool, out: Output) -> Other:
    from llamactl.verify import other

    label = "the candidate" if candidate else "the reference"
    if kind == "checkpoint":
        assert wrong is not None
        return other.of_checkpoint(wrong.model, wrong.weights, ids, ref or at.path,
                                   progress=_steps(out, "running the other"))
    if saved is not None:
        return other.of_saved(saved, right.model, kind, ref or "")
    if kind == TRANSFORMERS:
        return other.of_transformers(at.path, ids, right.model, right.weights, _layouts(at))
    return other.of_callable(ref or "", ids, right.model, right.weights, label, _layouts(at))


def _sides(labels: tuple[str, str], at: Located, mine: Opened, kind: str, ref: str | None, second: Opened | None
           ) -> tuple[Side, Side]:
    own = Side(label="the checkpoint", kind="checkpoint", ref=mine.source.id, family=mine.model.family,
               layout=at.layout, dtype=mine.model.dtype)
    other = Side(label=labels[0] if labels[0] != "the checkpoint" else labels[1], kind=kind, ref=ref or "",
                 family=second.model.family if second else None, layout=second.weights.layout if second else None,
                 dtype=second.model.dtype if second else None)
    return (own, other) if labels[0] == "the checkpoint" else (other, own)


def take_inventory(at: Located, out: Output) -> Inventory:
    """What the files of a located checkpoint hold, read once."""
    from llamactl.verify.inventory import take

    files = open_files(at)
    total = sum(t.nbytes for t in files.tensors.values())
    with Progress(out, "reading", total) as seen:
        return take(at.path, at.model, arch.names(at.model, at.layout), files, layout=at.layout,
                    ignored=arch.ignored(at.model, at.layout), seen=seen)


def _inventory_alone(at: Located, inventory: tuple[Inventory, ...]) -> VerifyReport:
    """Nothing to compare with: what the files say, and no verdict on the logits."""
    wrong = [f for i in inventory for f in i.findings if f.level == "error"]
    why = ("logits not judged: no reference. Give --reference (another checkpoint, 'transformers'), or record one from "
           "the source: llamactl reference SRC -o llamactl-reference.safetensors")
    if wrong:
        why = f"{wrong[0].tensor or at.path}: {wrong[0].message}"
    return VerifyReport(verdict="different" if wrong else "cannot-judge", why=why, sides=None, probe=None,
                        explanations=(), first_difference=None, layers=(), measures=None, floor=None,
                        inventory=inventory)


def _steps(out: Output, what: str) -> Any:
    """A callback for net.streamed: layers done, of how many."""
    words = Words(out)

    def progress(done: int, of: int) -> None:
        if done == of:
            words.__exit__(None, None, None)
        else:
            words(f"{what}: layer {done} of {of - 1}")

    return progress


def _say(asked: Asked, first: Opened, report: VerifyReport, warnings: list[tuple[str, str]], out: Output) -> int:
    """Files, the answer, and the exit code."""
    from llamactl.api import Loaded
    from llamactl.atomic import create
    from llamactl.cli.show import show

    code = EXITS[report.verdict]
    accepted = code == 1 and bool(report.explanations) and {e.edit for e in report.explanations} <= set(asked.accept)
    if asked.report is not None:
        from llamactl.render.verifyhtml import page

        html = page(report, accepted=accepted)
        create(os.path.expanduser(asked.report), html.encode("utf-8"), force=asked.force)
    if asked.junit is not None:
        from llamactl.render.junit import junit

        create(os.path.expanduser(asked.junit), junit(report, accepted=accepted).encode("utf-8"), force=asked.force)
    loaded = Loaded(model=first.model, source=first.source)
    show("verify", [loaded], [report], asked.inputs(), out, warnings=dict.fromkeys(warnings), result=report.to_dict())
    if asked.annotate:
        from llamactl.render.annotations import annotations

        for line in annotations(report, accepted=accepted):
            print(line, file=sys.stderr)
    if accepted:
        return 0
    if code == 1:
        print(f"error[verify]: {printable(report.why)}", file=sys.stderr)
    elif code == 4:
        print(f"error[cannot-judge]: {printable(report.why)}", file=sys.stderr)
    return code
