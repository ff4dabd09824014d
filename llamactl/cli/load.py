"""MODEL arguments -> described models."""

from __future__ import annotations

from collections.abc import Sequence

from llamactl.api import Loaded, load
from llamactl.cli.options import Access


def load_all(refs: Sequence[str] | None, edits: Sequence[str] | None, reach: Access) -> list[Loaded]:
    """Every MODEL, described, with the --set edits applied; none given means the current folder."""
    return [load(ref, edits=edits or (), offline=reach.offline, hub=reach.hub) for ref in refs or (None,)]
