"""Pictures of reports, with matplotlib (the extra `plot`): png, svg, or an HTML page around the svg."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from llamactl.analysis.ablation import AblateReport
from llamactl.analysis.kvcache import KvCacheReport
from llamactl.analysis.rope import RopeReport
from llamactl.errors import NotAvailable, UsageError, printable
from llamactl.render.theme import COLOURS, INK, page, text
from llamactl.render.units import count

FORMATS = ("png", "svg", "html")
_TEXT, _SOFT, _LINE, _BACK = list(INK)[:4]


def form_of(file: str) -> str:
    """The format that `file`'s ending asks for.

    Raises UsageError for another ending, NotAvailable without matplotlib.
    """
    form = file.rpartition(".")[2].lower()
    if form not in FORMATS:
        raise UsageError("plot", f"{file!r} does not end in .png, .svg or .html")
    try:
        import matplotlib.figure  # noqa: F401  for long work to fail before it begins
    except ImportError:
        raise NotAvailable("extra-missing", "--plot needs matplotlib", help="pip install 'llamactl[plot]'") from None
    return form


def picture(command: str, reports: Sequence[Any], file: str) -> bytes:
    """The picture that `file`'s ending asks for. Raises as form_of does."""
    form = form_of(file)
    import matplotlib
    from matplotlib.figure import Figure

    ink: Any = dict.fromkeys(("text.color", "axes.titlecolor"), _TEXT) | dict.fromkeys(
        ("axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), _SOFT)
    matplotlib.rcParams.update({"svg.hashsalt": "llamactl", "svg.fonttype": "path", "axes.spines.top": False,
                                "axes.spines.right": False, "axes.grid": True, "grid.color": _LINE, "font.size": 9,
                                "legend.edgecolor": _LINE, "legend.facecolor": _BACK, **ink})
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.add_subplot()
    draw: Any = {"rope": _rope, "kv-cache": _cache, "ablate": _losses}[command]
    title = draw(axes, reports)
    if form != "html":  # where it is the page's
        axes.set_title(title, loc="left", fontweight="bold")
    out = io.BytesIO()
    if form == "png":
        figure.savefig(out, format="png", dpi=150, metadata={"Software": "llamactl"})
        return out.getvalue()
    figure.savefig(out, format="svg", transparent=form == "html",
                   metadata={"Date": None, "Creator": "llamactl", "Title": title})
    return out.getvalue() if form == "svg" else _page(title, out.getvalue())


def _page(title: str, svg: bytes) -> bytes:
    """The picture in a page of the common look: its colours are the theme's, so that they follow light and dark."""
    drawing = svg[svg.index(b"<svg"):].decode("utf-8")
    for colour, name in INK.items():
        drawing = drawing.replace(colour, f"var({name})")
    return page(title, f"<h1>{text(title)}</h1>\n<figure role=\"img\" aria-label=\"{text(title)}\">{drawing}</figure>"
                ).encode()


def _rope(axes: Any, reports: Sequence[RopeReport]) -> str:
    """Wavelength of every pair, before and after stretching, against the trained and the usable or target context."""
    drawn = [(r, x) for r in reports for x in r.rotations]
    if not drawn:
        raise UsageError("plot", "nothing is rotated, so there is nothing to draw")
    for n, (r, x) in enumerate(drawn):
        colour = COLOURS[n % len(COLOURS)]
        name = printable(r.id) + (f", {x.layers} layers" if len(drawn) > 1 else "")
        pairs = [p.j for p in x.pairs]
        axes.plot(pairs, [p.wavelength for p in x.pairs], color=colour, lw=1.2, ls=":", label=f"{name}: unstretched")
        axes.plot(pairs, [p.stretched_wavelength for p in x.pairs], color=colour, lw=1.8, label=f"{name}: as applied")
        unseen = [p for p in x.pairs if p.unseen]
        axes.plot([p.j for p in unseen], [p.stretched_wavelength for p in unseen], "x", color=colour, ms=4)
    first = drawn[0][1]
    marks = {first.trained_context: "trained", first.usable_context: "usable", first.target_context: "target"}
    for context, word in marks.items():
        if context:
            axes.axhline(context, color=_SOFT, lw=0.8)
            axes.annotate(f"{word} {count(context)}", (0, context), textcoords="offset points", xytext=(2, 2),
                          fontsize=8)
    axes.set_yscale("log")
    axes.set_xlabel("pair (x: meets unseen angles)")
    axes.set_ylabel("positions per turn")
    axes.legend(fontsize=8, loc="lower right")
    return "RoPE wavelengths: " + ", ".join(dict.fromkeys(printable(r.id) for r, _ in drawn))


def _cache(axes: Any, reports: Sequence[KvCacheReport]) -> str:
    """Cache against context, a line for each model, batch and dtype; the weights as a level line."""
    lines: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
    for r in reports:
        for a in r.at:
            dtype = a.k_dtype if a.k_dtype == a.v_dtype else f"{a.k_dtype}/{a.v_dtype}"
            lines.setdefault((printable(r.id), a.batch, dtype), []).append((a.ctx, a.kv_cache_bytes))
    for n, ((name, batch, dtype), points) in enumerate(lines.items()):
        points.sort()
        label = f"{name}, {dtype}" + (f", batch {batch}" if batch > 1 else "")
        axes.plot([c for c, _ in points], [b / 2**30 for _, b in points], "o-", ms=3, lw=1.6, label=label,
                  color=COLOURS[n % len(COLOURS)])
    for n, r in enumerate(reports):
        axes.axhline(r.weights_bytes / 2**30, color=COLOURS[n % len(COLOURS)], lw=0.8, ls="--",
                     label=f"{printable(r.id)} weights, {r.weights_dtype}")
    axes.set_xscale("log", base=2)
    ticks = sorted({a.ctx for r in reports for a in r.at})
    axes.set_xticks(ticks, [f"{c >> 10}k" if c % 1024 == 0 else count(c) for c in ticks])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("GiB")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper left")
    return "KV cache: " + ", ".join(dict.fromkeys(printable(r.id) for r in reports))


def _losses(axes: Any, reports: Sequence[AblateReport]) -> str:
    """A bar for each measured edit, as long as its change of the loss, with the standard error on it."""
    (r,) = reports
    rows = [(x.edit, x.change, x.standard_error or 0.0) for x in r.ablations if x.change is not None]
    if not rows:
        raise UsageError("plot", "no edit was measured, so there is nothing to draw")
    names, changes, errors = zip(*reversed(rows), strict=True)
    axes.barh(range(len(rows)), changes, xerr=errors, color=COLOURS[0], ecolor=_SOFT, height=0.7)
    axes.set_yticks(range(len(rows)), [printable(n) for n in names], fontsize=7)
    axes.axvline(0, color=_SOFT, lw=0.8)
    axes.set_xlabel(f"change of the loss, nats per token (base {r.base_loss:.3f})")
    return f"Ablations of {printable(r.id)}"
