"""A small network on one text, and verdicts on what is held against it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from llamactl.analysis.verification import Probe, Side, VerifyReport
from llamactl.spec.mistakes import Change
from llamactl.spec.model import Model
from llamactl.verify.compared import Setting, compared, run_here
from llamactl.verify.floor import floor
from llamactl.verify.network import Network
from llamactl.verify.other import Other

SIDE = Side(label="the checkpoint", kind="checkpoint", ref="x")
SETTING = Setting(subject="the candidate", by="the checkpoint")
N = 64


class At:
    """One golden on one text: its logits, the stream after each layer, and verdicts on others."""

    def __init__(self, networks: ModuleType, name: str, n: int = N, factors: Mapping[str, float] | None = None) -> None:
        """factors: of some tensors, by canonical name."""
        g = networks.golden(name)
        self.model: Model = g.model
        self.source = networks.Held({n: t * (factors or {}).get(n, 1.0) for n, t in g.tensors.items()})
        ids = torch.randint(1, 90, (n,), generator=torch.Generator().manual_seed(1)).tolist()
        self.ids, self.ours = run_here(self.model, self.source, ids)
        self.net = Network(self.model, self.source, self.ids)
        self.limit = floor(self.model, self.source, self.ids, self.ours)[0].limit

    def wrong(self, *changes: Change) -> Tensor:
        got = self.net.logits(changes, N)
        assert got is not None
        return got

    def judge(self, logits: Tensor | None, setting: Setting = SETTING, **more: Any) -> VerifyReport:
        other = Other(kind="logits", ref="x", logits=logits, **more)
        return self.against(other, setting)

    def against(self, other: Other, setting: Setting = SETTING) -> VerifyReport:
        said = compared(self.model, self.source, self.ids, self.ours, other, (SIDE, SIDE),
                        Probe(tokens=self.ids.shape[1], source="given"), setting)
        assert (said.sides, said.floor is not None, said.measures is not None) == ((SIDE, SIDE), True, True)
        assert said.passed is (said.verdict in ("equal", "same"))
        return said
