"""`llamactl check`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llamactl.cli.options import Access, Output, command, new_app
from llamactl.cli.show import show

app = new_app()


@command(app, formats=("github", "junit"))
def check(
    budget: Annotated[str | None, typer.Argument(metavar="[BUDGET]", show_default=False, help="A .toml or .yaml file. "
                      "Default: [tool.llamactl.budget] of the nearest pyproject.toml.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="REF", show_default=False,
                                              help="Judge this model of the budget alone.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Write into the file what is exact and differs, and what is "
                                         "above its max.")] = False,
    *,
    out: Output,
    reach: Access,
) -> None:
    """Hold models to a budget: exact, max and min values of what they are and cost.

    Example: llamactl check budget.toml
    """
    from llamactl.analysis.budget import check_report, judge, updated, updates
    from llamactl.api import load
    from llamactl.cli import budgets
    from llamactl.source.budget import located, read

    file = read(budget)
    asked = budgets.chosen(file, model)
    loaded = [load(located(b.reference, file.path, hub=reach.hub), offline=reach.offline, hub=reach.hub) for b in asked]
    checks = [judge(b, x.model, id=x.id, probes=budgets.probes(x, reach)) for b, x in zip(asked, loaded, strict=True)]
    if update:
        pairs = list(zip(asked, checks, strict=True))
        budgets.write(file, {(b.reference, *at): v for b, c in pairs for at, v in updates(b, c).items()})
        checks = [updated(b, c) for b, c in pairs]
    report = check_report(file.path, checks)
    body = report.to_dict()
    body["models"] = [{**m, "source": x.source.to_dict()} for m, x in zip(body["models"], loaded, strict=True)]
    show("check", loaded, [report], {"budget": budget, "model": model, "update": update}, out, result=body,
         text=budgets.own_format(report, out.format))
    if not report.ok:
        print(f"error[budget]: {report.exceeded} of {report.limits} limits do not hold", file=sys.stderr)
        raise typer.Exit(1)
