"""`llamactl evolve`."""

from __future__ import annotations

from typing import Annotated

import typer

from llamactl.cli.load import load_all
from llamactl.cli.options import Access, Output, command, complete_model, new_app
from llamactl.cli.show import show

app = new_app()


@command(app)
def evolve(
    start: Annotated[str, typer.Argument(metavar="FROM", autocompletion=complete_model, help="The model to start at.")],
    goal: Annotated[str, typer.Argument(metavar="TO", autocompletion=complete_model, help="The model to arrive at.")],
    *,
    out: Output,
    reach: Access,
) -> None:
    """Walk from one model to another, one edit at a time, costing each step.

    Example: llamactl evolve gpt2 llama-3-8b
    """
    from llamactl.analysis.compare import evolve as walk

    a, b = load_all([start, goal], None, reach)
    report = walk(a.model, b.model, start=a.id, goal=b.id)
    models = [{"id": x.id, "family": x.model.family, "model_type": x.model.model_type, "source": x.source.to_dict()}
              for x in (a, b)]
    show("evolve", [a, b], [report], {"from": start, "to": goal}, out, result={"models": models, **report.to_dict()})
