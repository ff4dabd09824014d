"""MODEL arguments -> described models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamactl.cli.options import Access
from llamactl.errors import UsageError

if TYPE_CHECKING:
    from llamactl.api import Loaded


def load_all(refs: Sequence[str] | None, edits: Sequence[str] | None, reach: Access) -> list[Loaded]:
    """Every MODEL, described, with the --set edits applied; none given means the current folder."""
    from llamactl.api import load  # here, for --help and a typo need no description of a model

    return [load(ref, edits=edits or (), offline=reach.offline, hub=reach.hub) for ref in refs or (None,)]


def own_context(loaded: Loaded) -> int:
    """The positions the model can use, for when no --ctx is given."""
    usable = loaded.model.context.usable
    if usable is None:
        raise UsageError("no-ctx", f"{loaded.id} names no context of its own", help="give --ctx, e.g. --ctx 8192")
    return usable
