"""Meta's, nanoGPT's and hand-written layouts: the tensors of the same Hugging Face model, and its logits."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from llamactl import arch
from llamactl.arch._meta import from_params
from llamactl.arch._nanogpt import from_model_args
from llamactl.cli.options import Access
from llamactl.cli.runnable import Opened, open_model
from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.net.decoder import build
from llamactl.net.weights import open_weights
from llamactl.net.weights_meta import split_axis
from llamactl.spec.model import Model
from llamactl.spec.naming import Fused, RopePairs, Rule, Transposed

State = dict[str, Tensor]
OFFLINE = Access(offline=True, hub=False)
LLAMA: dict[str, Any] = {"head_dim": None, "num_attention_heads": 4, "vocab_size": 96}
BIASED = {"attention_bias": True, "mlp_bias": True}


class Source:
    """One golden from transformers: its config, stored state, and canonical tensors by the Hugging Face layout."""

    def __init__(self, folder: Path, config: dict[str, Any], state: State) -> None:
        self.folder, self.config, self.state = folder, config, state
        self.model = arch.describe(config, "config.json")
        hf = open_weights(str(folder), self.model, arch.names(self.model), layout="hf")
        self.tensors = {n: hf.tensor(n) for n in hf.names()}


@pytest.fixture(scope="module")
def sources(written: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    out = {}
    for name, golden, changes in (("llama", "llama", LLAMA), ("biased", "llama", {**LLAMA, **BIASED}),
                                  ("golden", "llama", {}), ("gpt2", "gpt2", {"activation_function": "gelu"})):
        folder = tmp_path_factory.mktemp(name)
        config = written.config_of(golden, **changes)
        out[name] = Source(folder, config, written.saved(folder, config))
    return out


def params(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "norm_eps": config["rms_norm_eps"],
            "n_heads": config["num_attention_heads"], "n_kv_heads": config["num_key_value_heads"],
            "vocab_size": config["vocab_size"], "hidden_dim": config["intermediate_size"],
            "rope_theta": config["rope_theta"]}


def same(opened: Opened, want: Mapping[str, Tensor]) -> bool:
    assert set(opened.weights.names()) == set(want)
    return all(torch.equal(opened.weights.tensor(n), want[n]) for n in want)


def logits(opened: Opened, ids: Tensor) -> Tensor:
    decoder = build(opened.model)
    decoder.assign(opened.weights)
    with torch.no_grad():
        return decoder(ids)[0]


def refused(call: Any, *args: Any) -> LlamactlError:
    with pytest.raises(LlamactlError) as e:
        call(*args)
    assert e.value.help or e.value.code.startswith("config-")
    assert "\n" not in e.value.message
    return e.value


# --- Meta


def put_meta(folder: Path, config: Mapping[str, Any], files: Sequence[State]) -> Path:
    (folder / "params.json").write_text(json.dumps(params(config)))
    for n, state in enumerate(files):
        torch.save(state, folder / f"consolidated.{n:02d}.pth")
    return folder


@pytest.mark.parametrize(("n", "embed_axis"), [(1, 0), (2, 0), (2, 1), (4, 1)])
def test_meta_files(written: Any, sources: dict[str, Source], tmp_path: Path, n: int, embed_axis: int) -> None:
    """One file, and ranks: Llama 3 cuts the embedding along its rows, Llama 1 and 2 along its columns."""
    s = sources["llama"]
    config = written.config_of("llama", **LLAMA, num_key_value_heads=4)
    state = written.saved(tmp_path / "hf", config)
    folder = tmp_path / "meta"
    folder.mkdir()
    put_meta(folder, config, written.ranks(written.meta(state, 4, 4), n, embed_axis))
    opened = open_model(str(folder), OFFLINE)
    model = arch.describe(config, "c")
    hf = open_weights(str(tmp_path / "hf"), model, arch.names(model), layout="hf")
    assert opened.weights.layout == "meta"
    assert same(opened, {t: hf.tensor(t) for t in hf.names()})
    assert opened.warnings == ()
    assert s.model.family == opened.model.family


@pytest.mark.parametrize("name", ["llama", "biased"])
def test_meta_rows_with_grouped_heads(written: Any, sources: dict[str, Source], tmp_path: Path, name: str) -> None:
    """4 query heads and 2 of K, biases too."""
    s = sources[name]
    put_meta(tmp_path, s.config, [written.meta(s.state, 4, 2)])
    config = {**from_params(params(s.config), "p"), **(BIASED if name == "biased" else {})}
    model = arch.describe(config, "p")
    weights = open_weights(str(tmp_path), model, arch.names(model, "meta"), layout="meta",
                           ignored=arch.ignored(model, "meta"))
    assert weights.warnings == ()
    assert all(torch.equal(weights.tensor(n), t) for n, t in s.tensors.items())


def test_meta_logits(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["llama"]
    put_meta(tmp_path, s.config, [written.meta(s.state, 4, 2)])
    ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(0))
    assert (logits(open_model(str(tmp_path), OFFLINE), ids) - logits(open_model(str(s.folder), OFFLINE), ids)
            ).abs().max() < 1e-5


def test_meta_names_in_safetensors(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    """As Mistral publishes them."""
    s = sources["llama"]
    put_meta(tmp_path, s.config, [])
    save_file(written.meta(s.state, 4, 2), tmp_path / "consolidated.safetensors")
    assert same(open_model(str(tmp_path), OFFLINE), s.tensors)


@pytest.mark.parametrize(("part", "whole", "n", "axis"), [
    ((4, 8), (8, 8), 2, 0), ((8, 4), (8, 8), 2, 1), ((8, 8), (8, 8), 2, None), ((8,), (8,), 4, None),
    ((2,), (8,), 4, 0), ((4, 4), (8, 8), 2, None), ((4, 8), (8,), 2, None), ((4, 8), None, 2, None)])
def test_the_axis_that_makes_the_whole(part: tuple[int, ...], whole: tuple[int, ...] | None, n: int, axis: int | None
                                       ) -> None:
    assert split_axis(part, whole, n) == axis


def meta_ranks(written: Any, s: Source) -> list[State]:
    out: list[State] = written.ranks(written.meta(s.state, 4, 2), 2, 1)
    return out


def test_a_missing_rank(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["llama"]
    put_meta(tmp_path, s.config, meta_ranks(written, s))
    (tmp_path / "consolidated.00.pth").unlink()
    e = refused(open_model, str(tmp_path), OFFLINE)
    assert e.code == "shard-missing"
    assert "consolidated.00.pth" in e.message


def test_one_rank_of_two(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    """The last rank cannot be seen to be missing by name; the shapes tell."""
    s = sources["llama"]
    put_meta(tmp_path, s.config, meta_ranks(written, s)[:1])
    assert refused(open_model, str(tmp_path), OFFLINE).code == "weights-shape"


def test_ranks_that_do_not_belong_together(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["llama"]
    ranks = meta_ranks(written, s)
    ranks[1]["norm.weight"] += 1
    e = refused(open_model, str(put_meta(tmp_path, s.config, ranks)), OFFLINE)
    assert e.code == "weights-shape"
    assert "norm.weight" in e.message
    del ranks[1]["norm.weight"]
    assert refused(open_model, str(put_meta(tmp_path, s.config, ranks)), OFFLINE).code == "weights-missing"


def test_ranks_of_other_shapes(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["llama"]
    ranks = meta_ranks(written, s)
    ranks[1]["layers.0.attention.wq.weight"] = torch.zeros(23, 48)
    assert refused(open_model, str(put_meta(tmp_path, s.config, ranks)), OFFLINE).code == "weights-shape"


def test_params_without_weights(sources: dict[str, Source], tmp_path: Path) -> None:
    e = refused(open_model, str(put_meta(tmp_path, sources["llama"].config, [])), OFFLINE)
    assert (e.code, e.exit_code) == ("weights-not-found", 4)


def test_a_scaled_rope_without_a_factor_is_said(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["llama"]
    put_meta(tmp_path, s.config, [written.meta(s.state, 4, 2)])
    for more, said in (({}, ["meta-rope-factor"]), ({"rope_scaling_factor": 32}, [])):
        (tmp_path / "params.json").write_text(json.dumps({**params(s.config), "use_scaled_rope": True, **more}))
        opened = open_model(str(tmp_path), OFFLINE)
        assert [c for c, _ in opened.warnings] == said
        rope: Any = opened.model.layers[0].attn
        assert rope.rope.scaling.factor == more.get("rope_scaling_factor", 8)


# --- nanoGPT

ARGS = {"n_layer": 3, "n_head": 6, "n_embd": 48, "block_size": 64, "bias": True, "vocab_size": 97, "dropout": 0.0}


def put_nano(folder: Path, state: State, args: Any = ARGS) -> Path:
    data = {"model": state, "model_args": args, "optimizer": {"state": {0: {"exp_avg": torch.zeros(3)}}},
            "iter_num": 10, "best_val_loss": torch.tensor(1.5), "config": {"dataset": "x", "compile": True}}
    torch.save({k: v for k, v in data.items() if v is not None}, folder / "ckpt.pt")
    return folder


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module."])
def test_nanogpt(written: Any, sources: dict[str, Source], tmp_path: Path, prefix: str) -> None:
    s = sources["gpt2"]
    put_nano(tmp_path, written.nanogpt(s.state, prefix=prefix))
    for ref in (tmp_path, tmp_path / "ckpt.pt"):
        opened = open_model(str(ref), OFFLINE)
        assert opened.weights.layout == "nanogpt"
        assert [code for code, _ in opened.warnings] == ["nanogpt-gelu"]
        assert same(opened, s.tensors)
    ids = torch.arange(40)[None]
    assert (logits(opened, ids) - logits(open_model(str(s.folder), OFFLINE), ids)).abs().max() < 1e-5


def test_nanogpt_without_biases_is_zero_biases(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["gpt2"]
    put_nano(tmp_path, written.nanogpt(s.state, bias=False), {**ARGS, "bias": False})
    opened = open_model(str(tmp_path), OFFLINE)
    assert not any(n.endswith(".bias") for n in opened.weights.names())
    assert opened.model.total() == sum(t.numel() for n, t in s.tensors.items() if not n.endswith(".bias"))
    full = build(s.model)
    zero = {n: torch.zeros_like(t) if n.endswith(".bias") else t for n, t in s.tensors.items()}
    full.assign(type("Zero", (), {"tensor": lambda _, name: zero[name]})())
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (logits(opened, ids) - full(ids)[0]).abs().max() < 1e-5


def test_nanogpt_padded_vocabulary_and_exact_gelu() -> None:
    model = arch.describe(from_model_args({**ARGS, "vocab_size": 50304}, "ckpt.pt"), "ckpt.pt")
    assert model.embed.vocab == 50304
    assert model.layers[0].mlp is not None
    assert getattr(model.layers[0].mlp, "activation") == "gelu"  # noqa: B009
    assert model.tied


@pytest.mark.parametrize(("args", "code"), [
    ({k: v for k, v in ARGS.items() if k != "vocab_size"}, "config-missing"), ({**ARGS, "n_layer": "3"}, "config-type"),
    ({**ARGS, "n_embd": 50}, "config-heads"), ({**ARGS, "n_head": 0}, "config-range"), ([1], "config-type"),
    (None, "config-missing-file"), ({**ARGS, "n_layer": 2}, None), ({**ARGS, "n_layer": 4}, "weights-missing"),
    ({**ARGS, "vocab_size": 96}, "weights-shape"), ({**ARGS, "bias": 1}, "config-type")])
def test_nanogpt_arguments_are_checked(written: Any, sources: dict[str, Source], tmp_path: Path, args: Any,
                                       code: str | None) -> None:
    put_nano(tmp_path, written.nanogpt(sources["gpt2"].state), args)
    if code is None:  # a block too many in the file is named
        opened = open_model(str(tmp_path), OFFLINE)
        assert "weights-unexpected" in [c for c, _ in opened.warnings]
        return
    assert refused(open_model, str(tmp_path), OFFLINE).code == code


# --- written by hand


def put_lesson(folder: Path, config: Mapping[str, Any], state: State, kind: str) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "safetensors":
        save_file({k: v.contiguous().clone() for k, v in state.items()}, folder / "model.safetensors")
    else:
        torch.save(state, folder / "weights.pt")
    return folder


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
@pytest.mark.parametrize("name", ["llama", "biased", "gpt2"])
def test_lesson(written: Any, sources: dict[str, Source], tmp_path: Path, name: str, kind: str) -> None:
    s = sources[name]
    state = written.lesson_gpt2(s.state) if name == "gpt2" else written.lesson_llama(s.state, 4, 2)
    put_lesson(tmp_path, s.config, state, kind)
    opened = open_model(str(tmp_path), OFFLINE)
    assert opened.weights.layout == "lesson"
    assert opened.warnings == ()
    assert same(opened, s.tensors)
    assert same(open_model(str(next(tmp_path.glob("*.[sp]*t*"))), OFFLINE), s.tensors)


def test_lesson_logits(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["golden"]
    put_lesson(tmp_path, s.config, written.lesson_llama(s.state, 6, 2), "pt")
    ids, want = written.golden_logits("llama")
    assert (logits(open_model(str(tmp_path), OFFLINE), ids) - want).abs().max() < 2e-4


def test_a_mask_in_a_lesson_is_no_news(written: Any, sources: dict[str, Source], tmp_path: Path) -> None:
    s = sources["gpt2"]
    put_lesson(tmp_path, s.config, {**written.lesson_gpt2(s.state), "blocks.0.attn.mask": torch.ones(64, 64)}, "pt")
    assert open_model(str(tmp_path), OFFLINE).warnings == ()


def test_hugging_face_names_without_their_prefix_stay_hugging_face(sources: dict[str, Source], tmp_path: Path) -> None:
    """`wte` and `wpe` are lesson names too."""
    s = sources["gpt2"]
    put_lesson(tmp_path, s.config, {k.removeprefix("transformer."): v for k, v in s.state.items()}, "safetensors")
    opened = open_model(str(tmp_path), OFFLINE)
    assert opened.weights.layout == "hf"
    assert same(opened, s.tensors)


# --- each operation of each table, changed once


def mutations(rules: Sequence[Rule]) -> Iterator[tuple[int, Rule]]:
    for n, r in enumerate(rules):
        if r.ops:
            yield n, r._replace(ops=r.ops[1:] if len(r.ops) > 1 else ())
        if any(isinstance(op, RopePairs) for op in r.ops):
            yield n, r._replace(groups="kv_heads" if r.groups == "heads" else "heads")
            yield n, r._replace(ops=(RopePairs(pairs="half"),))
        if any(isinstance(op, Fused) for op in r.ops):
            yield n, r._replace(of=r.of[::-1])
        yield n, r._replace(ops=(*r.ops, Transposed()))


@pytest.mark.parametrize(("layout", "name"), [("meta", "biased"), ("lesson", "biased"), ("lesson", "gpt2"),
                                              ("nanogpt", "gpt2")])
def test_a_changed_table_reads_other_tensors(written: Any, sources: dict[str, Source], tmp_path: Path, layout: str,
                                             name: str) -> None:
    s = sources[name]
    state = {"meta": lambda: written.meta(s.state, 4, 2), "nanogpt": lambda: written.nanogpt(s.state),
             "lesson": lambda: written.lesson_gpt2(s.state) if name == "gpt2" else written.lesson_llama(s.state, 4, 2)
             }[layout]()
    file = tmp_path / {"meta": "consolidated.00.pth"}.get(layout, "x.pt")
    torch.save({"model": state} if layout == "nanogpt" else state, file)
    path = str(tmp_path if layout == "meta" else file)
    rules = arch.names(s.model, layout)
    assert equal(s.model, rules, layout, path, s.tensors)
    held = {t.template for t in s.model.tensors()}
    changes = [(n, r) for n, r in mutations(rules) if not held.isdisjoint(r.of)]
    assert len(changes) > 15
    assert [r for n, r in changes if equal(s.model, (*rules[:n], r, *rules[n + 1 :]), layout, path, s.tensors)] == []


def equal(model: Model, rules: Sequence[Rule], layout: str, path: str, want: Mapping[str, Tensor]) -> bool:
    try:
        weights = open_weights(path, model, rules, layout=layout)
        return all(torch.equal(weights.tensor(n), t) for n, t in want.items())
    except (InputRefused, ValueError, IndexError, RuntimeError):
        return False


# --- references without weights


@pytest.mark.parametrize("ref", ["llama-3-8b", "preset:llama-3-8b"])
def test_a_preset_has_no_weights(ref: str) -> None:
    e = refused(open_model, ref, OFFLINE)
    assert isinstance(e, NotAvailable)
    assert e.code == "weights-not-found"


def test_a_hub_id_with_a_preset_and_no_files_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    e = refused(open_model, "meta-llama/Meta-Llama-3-8B", OFFLINE)
    assert (e.code, e.exit_code) == ("weights-not-found", 4)
    assert "hf download meta-llama/Meta-Llama-3-8B" in str(e.help)


def test_weights_without_a_config(sources: dict[str, Source], tmp_path: Path) -> None:
    torch.save(sources["llama"].state, tmp_path / "model.pt")
    assert refused(open_model, str(tmp_path / "model.pt"), OFFLINE).code == "config-missing-file"


def test_a_config_without_weights(sources: dict[str, Source], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(sources["llama"].config))
    assert refused(open_model, str(tmp_path), OFFLINE).code == "no-weights"


def test_a_layout_that_a_family_lacks() -> None:
    model = arch.describe(json.loads((Path(__file__).parents[1] / "golden" / "bloom" / "config.json").read_text()), "c")
    for layout in ("meta", "lesson", "gguf"):
        assert refused(arch.names, model, layout).code == "layout-unknown"


def test_a_hub_model_in_the_local_cache(sources: dict[str, Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                        ) -> None:
    """Read without a request where its weights lie there; else exit 4 and the command that fetches them."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    s, commit = sources["llama"], "a" * 40
    for name in ("org/model", "meta-llama/Meta-Llama-3-8B"):  # the second is bundled as a preset too
        repo = tmp_path / f"models--{name.replace('/', '--')}"
        snapshot = repo / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repo / "refs").mkdir()
        (repo / "refs" / "main").write_text(commit)
        (snapshot / "config.json").write_text(json.dumps(s.config))
        e = refused(open_model, name, OFFLINE)
        assert (e.code, e.exit_code) == ("weights-not-found", 4)
        assert f"hf download {name}" in str(e.help)
        save_file(s.state, snapshot / "model.safetensors")
        opened = open_model(name, OFFLINE)
        assert opened.source.source == "hub"
        assert same(opened, s.tensors)
