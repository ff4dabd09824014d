"""A verify report as GitHub workflow commands: the lines that stand beside a change in a pull request."""

from llamactl.analysis.verification import Finding, VerifyReport
from llamactl.errors import printable
from llamactl.render.verdict import explained, located, multiple, noticed, times, word

MOST = 9  # of a level beside the verdict: GitHub shows ten a step and drops the rest unseen


def annotations(r: VerifyReport, accepted: bool = False) -> list[str]:
    """`::error|warning|notice title=...::...`: the verdict and what explains it, then faults of the files.

    accepted: what explains it may be so; the verdict is a notice.
    """
    level = "notice" if r.passed or accepted else "warning" if r.verdict == "cannot-judge" else "error"
    out = [_command(level, f"llamactl verify: {word(r, accepted)}", _story(r))]
    for kind in ("error", "warning"):
        some = [(i.path, f) for i in r.inventory for f in i.findings if f.level == kind]
        room = MOST if kind != level or len(some) <= MOST else MOST - 1
        out += [_finding(kind, path, f) for path, f in some[:room]]
        if len(some) > room:
            out.append(_command(kind, "llamactl verify: inventory", [f"and {len(some) - room:,} more; see the report"]))
    return out


def _story(r: VerifyReport) -> list[str]:
    far = multiple(r.measures, r.floor)
    lines = [r.why]
    for e in r.explanations:
        lines += [f"{label}: {text}" for label, text in explained(e, r.floor, len(r.explanations) > 1)]
    if r.first_difference is not None and not r.passed:
        lines += [f"{label}: {text}" for label, text in located(r.first_difference)]
    if far is not None and not r.passed:
        lines.append(f"max |dlogit| is {times(far)} the limit")
    return [*lines, *(f"cannot see: {x}" for x in r.limits)]


def _finding(level: str, path: str, f: Finding) -> str:
    return _command(level, f"llamactl verify: {f.code}", [f"{path}: {noticed(f)}"])


def _command(level: str, title: str, lines: list[str]) -> str:
    """A workflow command in one line; what its reader would take for syntax is escaped."""
    said = "%0A".join(_escaped(printable(x)) for x in lines)
    return f"::{level} title={_escaped(printable(title)).replace(':', '%3A').replace(',', '%2C')}::{said}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
