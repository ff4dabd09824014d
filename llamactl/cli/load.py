"""MODEL arguments -> described models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from llamactl.cli.options import Access

if TYPE_CHECKING:
    from llamactl.api import Loaded


def load_all(refs: Sequence[str] | None, edits: Sequence[str] | None, reach: Access) -> list[Loaded]:
    """Every MODEL, described, with the --set edits applied; none given means the current folder."""
    from llamactl.api import load  # here, for --help and a typo need no description of a model

    return [load(ref, edits=edits or (), offline=reach.offline, hub=reach.hub) for ref in refs or (None,)]
