"""One of several processes for test_parallel.py: python rank.py RANK WORLD FOLDER; FOLDER/asked.json says what to do.

Writes FOLDER/WORLD-RANK.pt: {model: {logits, tokens, logprobs, nbytes}, "sampler": [...], "share": ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from llamactl.cli.options import Access
from llamactl.cli.runnable import open_model
from llamactl.net.cache import Cache
from llamactl.net.generate import cache_length, generate
from llamactl.net.group import Group, join
from llamactl.net.parallel import Split
from llamactl.net.parallel_sample import SplitSampler
from llamactl.net.sample import Sampling


def of_model(folder: Path, group: Group, asked: dict[str, Any]) -> dict[str, Any]:
    """Logits of this rank's part of the vocabulary, and texts."""
    opened = open_model(str(folder), Access(offline=True, hub=False))
    split = Split(opened.model, group)
    split.assign(opened.weights)
    ids = asked["ids"]
    with torch.inference_mode():
        logits = split(torch.tensor([ids]))
    made = []
    for words in asked["samplings"]:
        sampling = Sampling(**words)
        cache = Cache(split.share, 1, cache_length(opened.model, len(ids), asked["max_new"]), dtype=torch.float32)
        made.append(generate(split, ids, max_new=asked["max_new"], sampling=sampling, cache=cache, logprobs=True,
                             sampler=split.sampler(sampling)))
    return {"logits": logits, "tokens": [m.tokens for m in made], "logprobs": [m.logprobs for m in made],
            "nbytes": split.nbytes()}


def of_sampler(rows: torch.Tensor, ids: torch.Tensor, words: dict[str, Any], draws: int, group: Group) -> Any:
    """Tokens, largest logits and log-probabilities of a few draws from `rows`, of which this rank sees its columns."""
    vocab = rows.shape[-1]
    first, stop = vocab * group.rank // group.world, vocab * (group.rank + 1) // group.world
    sampler = SplitSampler(Sampling(**words), group, first, stop, vocab)
    sampler.meet(ids, stop - first)
    out = []
    for _ in range(draws):
        token, top = sampler.choose(rows[:, first:stop])
        out.append((token, top, sampler.logprob(rows[:, first:stop], token)))
        sampler.meet(token[:, None], stop - first)
    return out


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = join(rank, world, torch.device("cpu"), file=str(folder / f"meet-{world}"), alone=True)
    asked = json.loads((folder / "asked.json").read_text())
    out: dict[str, Any] = {name: of_model(folder / name, group, asked) for name in asked["models"][str(world)]}
    data = torch.load(folder / "rows.pt")
    with torch.inference_mode():
        out["sampler"] = [of_sampler(data["rows"], data["ids"], words, asked["draws"], group)
                          for words in asked["settings"]]
    out["share"] = group.share({"text": "é", "numbers": [1, 2.5, None]} if rank == 0 else None)
    out["agree"] = [group.agree(rank == 0), group.agree(rank != 0)]
    torch.save(out, folder / f"{world}-{rank}.pt")
    group.leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
