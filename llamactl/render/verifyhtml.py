"""The page of `llamactl verify --report`: what the terminal says, and pictures; one file, for people and archives."""

from __future__ import annotations

from collections.abc import Sequence

from llamactl.analysis.verification import Layer, VerifyReport
from llamactl.render.svg import bars, curve
from llamactl.render.theme import bullets, pairs, section, table, text
from llamactl.render.theme import page as whole
from llamactl.render.verdict import (
    compared,
    explained,
    faulty,
    layer_of,
    listed,
    located,
    measured,
    multiple,
    noticed,
    number,
    sentence,
    stretches,
    times,
    word,
)

POINTS = 480  # of a curve; more could not be told apart
ROWS = 16  # of the table beside it
_TONE = {"equal": "good", "same": "good", "cannot-judge": "warn"}


def page(r: VerifyReport, accepted: bool = False) -> str:
    """The report as one HTML file without network or script. accepted: what explains the difference may be so."""
    tone = _TONE["same"] if accepted else _TONE.get(r.verdict, "bad")
    far = multiple(r.measures, r.floor)
    head = [f"<h1>llamactl verify: <span class=\"{tone}\">{text(word(r, accepted))}</span></h1>",
            f"<p class=\"lead\">{text(r.why)}</p>"]
    if far is not None:
        head.append(f"<p>The largest difference of a logit is <strong>{text(times(far))}</strong> the limit of what "
                    "arithmetic does here.</p>")
    parts = [
        "<header>\n" + "\n".join(head) + "\n</header>",
        section("Compared", pairs(compared(r))),
        section("Explanation" if r.verdict == "explained" else "Part of the explanation", _explanations(r)),
        section("Where it begins", pairs(located(r.first_difference)) if r.first_difference else ""),
        section("KL by position", _curve(r)),
        section("Error by layer", _layers(r)),
        section("Logits, the second against the first", pairs(measured(r.measures, r.floor)) if r.measures else ""),
        section("Inventory", _inventory(r)),
        section("What this run cannot see", bullets(r.limits)),
        _foot(r),
    ]
    return whole(f"llamactl verify: {sentence(r)}", "\n".join(x for x in parts if x))


def _explanations(r: VerifyReport) -> str:
    several = len(r.explanations) > 1
    return "\n".join(f"<div class=\"card bad\">\n<h3><code>{text(e.edit)}</code> in {text(e.scope)}</h3>\n"
                     f"{pairs(explained(e, r.floor, several)[2:])}\n</div>" for e in r.explanations)


def _curve(r: VerifyReport) -> str:
    m = r.measures
    if m is None or not m.kl_by_position:
        return ""
    if all(x == 0 for x in m.kl_by_position):
        return f"<p>Zero at all {len(m.kl_by_position):,} positions.</p>"
    values = m.kl_by_position
    fine = stretches(values, POINTS, alone=1)  # what the first token says must not drown in its neighbours
    step = fine[-1][0] - fine[-2][0] if len(fine) > 1 else 1
    odd = sum(x is None for x in values)
    quarters = ", ".join(map(number, m.kl_by_quarter))
    said = (f"KL of the second against the first at each of {len(values):,} positions on a log scale: "
            f"{number(values[0])} nats at position 0, at most {number(m.max_kl)}, by quarter {quarters}"
            + (f"; not finite at {odd:,} positions" if odd else ""))
    level = r.floor.max_kl if r.floor else None
    each = f", the largest of every {step} positions" if step > 1 else ""
    drawn = curve("KL by position", said, [x for _, _, x in fine], across="position", level=level,
                  numbers=[a for a, _, _ in fine])
    rows = [(_range(a, b), "not finite" if x is None else number(x)) for a, b, x in stretches(values, ROWS, alone=1)]
    return _figure(drawn, f"nats, log scale{each}; zero lies on the ground line", ("positions", "largest KL"), rows)


def _layers(r: VerifyReport) -> str:
    if not any(x.relative is None or x.relative > 0 for x in r.layers):
        return f"<p>Zero in all {len(r.layers):,} layers.</p>" if r.layers else ""
    wrong = {n for place in faulty(r) if (n := layer_of(place)) is not None}
    worst = max(r.layers, key=lambda x: float("inf") if x.relative is None else x.relative)
    said = (f"Relative error of the output of each of {len(r.layers):,} layers on a log scale, fed with the right "
            f"input: the largest is {_error(worst)} in layer {worst.layer}"
            + (f"; wrong on their own: layers {', '.join(map(str, sorted(wrong)))}" if wrong else ""))
    p = r.first_difference
    drawn = bars("Error by layer", said, [(x.layer, x.relative) for x in r.layers], across="layer",
                 level=p.floor if p else None, wrong=wrong)
    rows = [(str(x.layer), _error(x) + (", wrong on its own" if x.layer in wrong else "")) for x in r.layers]
    return _figure(drawn, "per-token relative error, log scale; red: wrong on its own, or not finite",
                   ("layer", "relative error"), rows)


def _error(x: Layer) -> str:
    return "not finite" if x.relative is None else number(x.relative)


def _range(a: int, b: int) -> str:
    return f"{a:,}" if a == b else f"{a:,} to {b:,}"


def _figure(drawn: str, caption: str, head: Sequence[str], rows: Sequence[tuple[str, str]]) -> str:
    """A picture, and behind a fold its numbers: for those who cannot see it and those who want to copy them."""
    return (f"<figure>\n{drawn}\n<figcaption>{text(caption)}</figcaption>\n</figure>\n"
            f"<details>\n<summary>The numbers</summary>\n{table(head, rows)}\n</details>")


def _inventory(r: VerifyReport) -> str:
    out = []
    for i in r.inventory:
        levels = {f.level for f in i.findings}
        tone = " bad" if "error" in levels else " warn" if "warning" in levels else ""
        out.append(f"<div class=\"card{tone}\">\n<p>{text(listed(i))}</p>\n"
                   f"{pairs((f.level, noticed(f)) for f in i.findings)}\n</div>")
    return "\n".join(out)


def _foot(r: VerifyReport) -> str:
    return f"<footer>\n<p>{r.tried:,} hypotheses tried</p>\n</footer>" if r.tried else ""
