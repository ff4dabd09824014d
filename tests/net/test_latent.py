"""Latent attention in the network: both of its forms, its cache, and its scale, held to transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.net.cache import Cache
from llamactl.net.decoder import Decoder, build
from llamactl.net.latent import Latent
from llamactl.spec.latent import LatentAttention
from llamactl.spec.model import Model

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
VARIANTS: dict[str, Any] = json.loads((GOLDEN.parent / "arch" / "variants.json").read_text(encoding="utf-8"))
RUN = ["deepseek_v2", "deepseek_v2-q-rank", "deepseek_v3", "deepseek_v3-plain-q", "kimi_k2", "kimi_k25", "minicpm3",
       "minicpm3-plain-q-untied"]
TOKENS = 24


def config(name: str) -> dict[str, Any]:
    golden, changes = VARIANTS.get(name, (name, {}))
    data: dict[str, Any] = json.loads((GOLDEN / golden / "config.json").read_text(encoding="utf-8"))
    return data | changes


def parts(model: Model) -> list[LatentAttention]:
    return [layer.attn for layer in model.layers if isinstance(layer.attn, LatentAttention)]


class Held:
    """A golden's canonical tensors as a source of weights."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]


@pytest.fixture(scope="session")
def decoder(content: ModuleType) -> Callable[..., Decoder]:
    """A golden's or a variant's network with its weights; change: what is done to the attention described."""

    def made(name: str, **change: Any) -> Decoder:
        built = content.built(name)
        model = built.model
        if change:
            model = replace(model, layers=tuple(replace(x, attn=replace(x.attn, **change)) for x in model.layers))
        out = build(model)
        out.assign(Held(content.canonical(built, arch.names(built.model))))
        return out

    return made


@pytest.fixture(scope="session")
def said(make_golden: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Tensor, Tensor]]:
    """(ids, transformers' logits) of a golden or a variant."""

    @lru_cache
    def read(name: str) -> tuple[Tensor, Tensor]:
        if (GOLDEN / name).exists():
            file = json.loads((GOLDEN / name / "logits.json").read_text(encoding="utf-8"))
            return torch.tensor([file["ids"]]), torch.tensor(file["logits"])
        folder = tmp_path_factory.mktemp("variant")
        (folder / "config.json").write_text(json.dumps(config(name)), encoding="utf-8")
        ids = torch.randint(1, 96, (1, TOKENS), generator=torch.Generator().manual_seed(2))
        return ids, torch.tensor(make_golden.logits(make_golden.build(folder), ids))

    return read


def run(net: Decoder, ids: Tensor, cuts: list[int]) -> Tensor:
    """Logits of `ids` given in pieces."""
    cache = Cache(net.model, len(ids), ids.shape[1], dtype=torch.float32)
    pieces = [net(ids[:, a:b], cache) for a, b in zip(cuts, cuts[1:], strict=False)]
    return torch.cat(pieces, 1)


@pytest.fixture(params=["absorbed", "expanded", "either"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each of the two forms alone, and the network's own choice between them."""
    if request.param != "either":
        monkeypatch.setattr(Latent, "absorbs", lambda self, new, seen: request.param == "absorbed")
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", RUN)
def test_logits(name: str, form: str, decoder: Any, said: Any) -> None:
    net, (ids, want) = decoder(name), said(name)
    n = ids.shape[1]
    assert (net(ids)[0] - want).abs().max() < 2e-4
    for cuts in ([0, n], [0, 10, 13, n], [0, *range(5, n + 1)]):
        assert (run(net, ids, cuts)[0] - want).abs().max() < 2e-4


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3"])
def test_left_padding(name: str, form: str, decoder: Any, said: Any) -> None:
    """A padded row gives the logits of the row alone."""
    net, (ids, _) = decoder(name), said(name)
    short = ids[:, :15]
    both = torch.cat((ids[:, :20], torch.cat((torch.zeros_like(short[:, :5]), short), 1)))
    cache = Cache(net.model, 2, 24, dtype=torch.float32)
    out = net(both, cache, pad=torch.tensor([0, 5]))
    alone = Cache(net.model, 1, 24, dtype=torch.float32)
    want = net(short, alone)
    assert (out[1, 5:] - want[0]).abs().max() < 2e-5
    more = torch.cat((ids[:, 20:21], ids[:, 15:16]))
    assert (net(more, cache)[1] - net(more[1:], alone)[0]).abs().max() < 2e-5


@pytest.mark.parametrize(("name", "change"), [
    ("deepseek_v2", {"scale": None}), ("kimi_k2", {"scale": None}), ("deepseek_v3", {"scale": 0.2}),
    ("deepseek_v3", {"rope": None}), ("deepseek_v3", {"eps": 0.1}),
])
def test_a_wrong_description_is_seen(name: str, change: dict[str, Any], decoder: Any, said: Any) -> None:
    ids, want = said(name)
    assert (decoder(name, **change)(ids)[0] - want).abs().max() > 1e-3


@pytest.mark.parametrize(("name", "pairs"), [("deepseek_v3", "half"), ("deepseek_v3-plain-q", "adjacent"),
                                             ("minicpm3", "adjacent")])
def test_wrong_pairs_are_seen(name: str, pairs: str, decoder: Any, said: Any, content: ModuleType) -> None:
    ids, want = said(name)
    rope = parts(content.built(name).model)[0].rope
    assert rope
    assert rope.pairs != pairs
    assert (decoder(name, rope=replace(rope, pairs=pairs))(ids)[0] - want).abs().max() > 1e-3


# --- the scale


YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "kimi_k2", "minicpm3"])
@pytest.mark.parametrize("scaling", [
    ..., None, YARN, {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, {**YARN, "mscale": 0.5, "mscale_all_dim": 0.707},
    {**YARN, "mscale_all_dim": 0.3}, {**YARN, "mscale": 1.0}, {**YARN, "mscale": 1.0, "mscale_all_dim": 0},
    {**YARN, "factor": 1.0, "mscale_all_dim": 1.0}, {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
], ids=lambda s: "golden" if s is ... else "-".join(str(s.get(k)) for k in ("factor", "mscale", "mscale_all_dim"))
   if s else "none")
def test_scale(name: str, scaling: Any, make_golden: ModuleType, tmp_path: Path) -> None:
    data = config(name)
    if scaling is not ...:
        data.pop("rope_parameters", None)
        data["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    hf = make_golden.build(tmp_path)
    theirs = [m.scaling for m in hf.modules() if hasattr(m, "kv_b_proj")]
    for part, scale in zip(parts(arch.describe(data, name)), theirs, strict=True):
        plain = (part.qk_nope + part.qk_rope) ** -0.5
        assert (plain if part.scale is None else part.scale) == pytest.approx(scale, rel=1e-12)


# --- what is kept, and what one more token costs


def test_the_cache_is_what_the_description_says(decoder: Any) -> None:
    net = decoder("deepseek_v3")
    part = parts(net.model)[0]
    each = sum(layer.attn.cache().elements for layer in net.model.layers)
    assert each == 3 * (part.kv_rank + part.qk_rope)
    assert Cache(net.model, 2, 50, dtype=torch.float32).nbytes == 2 * 50 * each * 4


def test_one_more_token_expands_nothing(decoder: Any, said: Any) -> None:
    net, (ids, _) = decoder("deepseek_v3"), said("deepseek_v3")
    used: list[nn.Module] = []
    for layer in net.layers:
        for part in (layer.attn.k_b, layer.attn.v_b):
            part.register_forward_hook(lambda m, _i, _o: used.append(m))
    cache = Cache(net.model, 1, 24, dtype=torch.float32)
    net(ids[:, :20], cache)
    used.clear()
    net(ids[:, 20:21], cache)
    assert used == []


def test_the_cheaper_form_is_taken() -> None:
    """DeepSeek-V3's widths: one token is absorbed however long the text, a long prompt is expanded."""
    part = LatentAttention(hidden=64, n_heads=128, q_rank=None, kv_rank=512, qk_nope=128, qk_rope=64, v_dim=128,
                           eps=1e-6)
    layer = Latent(part, dtype=torch.float32)
    assert layer.absorbs(1, 1)
    assert layer.absorbs(1, 100_000)
    assert layer.absorbs(8, 10_000)
    assert not layer.absorbs(2048, 2048)
    assert not layer.absorbs(512, 30_000)


def test_bf16_stays_near(decoder: Any, content: ModuleType, form: str) -> None:
    """In bf16 both forms are as near to fp32 as the type allows."""
    name = "minicpm3"
    built = content.built(name)
    ids = torch.randint(1, 96, (1, TOKENS), generator=torch.Generator().manual_seed(2))
    want = decoder(name)(ids)
    net = build(built.model, dtype=torch.bfloat16)
    net.assign(Held(content.canonical(built, arch.names(built.model))), dtype=torch.bfloat16)
    got = net(ids)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_is_refused(name: str) -> None:
    part = parts(arch.describe(config(name), name))[0]
    with pytest.raises(InputRefused, match=r"indexer chooses the tokens that are read \(DSA\)") as e:
        Latent(part, dtype=torch.float32)
    assert e.value.code == "not-runnable"


@pytest.mark.parametrize("name", RUN)
def test_parameter_names_are_the_leaves(name: str) -> None:
    for part in parts(arch.describe(config(name), name)):
        found = {n: tuple(p.shape) for n, p in Latent(part, dtype=torch.float32).named_parameters()}
        assert found == {leaf.path: leaf.shape for leaf in part.leaves()}
