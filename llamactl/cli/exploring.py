"""The page of `explore`, made from loaded models and told."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llamactl.cli.options import Output
from llamactl.errors import printable

if TYPE_CHECKING:
    from llamactl.analysis.explore import ExploreReport
    from llamactl.api import Loaded


def made(loaded: Sequence[Loaded]) -> tuple[ExploreReport, bytes]:
    """What the page says, and the page itself. Raises LlamactlError."""
    from llamactl.analysis.explore import explore
    from llamactl.render.explore import page
    from llamactl.source.gpus import every

    first, second = loaded[0], loaded[1] if len(loaded) > 1 else None
    report = explore(first.model, second.model if second else None, start=_name(first),
                     goal=_name(second) if second else None)
    devices = [{"name": g.name, "title": g.title, "memory_bytes": g.memory_bytes} for g in every().values()]
    return report, page(report, devices).encode("utf-8")


def _name(x: Loaded) -> str:
    """What a command line calls the model. A page is passed on: of a local path it holds the last name alone."""
    revision = f"@{x.source.revision}" if x.source.source == "hub" and x.source.revision else ""
    return printable(x.id + revision)


def show_page(loaded: Sequence[Loaded], report: ExploreReport, page: bytes, path: str | None, url: str | None,
              inputs: dict[str, Any], out: Output) -> None:
    """The answer on stdout, at once, for a served page is waited at."""
    from llamactl.analysis.explore import PageReport
    from llamactl.cli.show import show

    told = PageReport(start=report.start.id, goal=report.goal.id if report.goal else None, path=path, url=url,
                      page_bytes=len(page), states=report.states, rest=report.rest,
                      switches=tuple((s.key, s.title) for s in report.switches))
    models = [{"id": x.id, "family": x.model.family, "model_type": x.model.model_type, "source": x.source.to_dict()}
              for x in loaded]
    show("explore", loaded, [told], inputs, out, result={"models": models, **told.to_dict()})
    sys.stdout.flush()
