"""Every edit of a model runs, changes what it says, and is transformers' where transformers can say the same."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from llamactl import arch
from llamactl.errors import InputRefused, LlamactlError, UsageError
from llamactl.net.decoder import build
from llamactl.net.positions import alibi_slopes
from llamactl.spec import edits
from llamactl.spec.model import Model
from llamactl.spec.parts import Attention

# edit -> whether the logits differ from the model's own with the same weights (those of new tensors are drawn)
ON_LLAMA = {
    "n_kv_heads=1": True, "n_kv_heads=6": True, "n_heads=4": True, "head_dim=16": True, "hidden=60": True,
    "ffn=40": True, "n_layers=2": True, "n_layers=5": True, "vocab=97": False, "tie=true": True, "untie": False,
    "activation=gelu": True, "activation=silu": False, "gelu_tanh": True, "relu": True, "activation=relu2": True,
    "activation=quick_gelu": True, "activation=tanh": True, "activation=sigmoid": True, "no-gate": True,
    "layernorm": True, "norm=rms": False, "biases": True, "no-biases": False, "context=32": False, "dropout=0.5": False,
    "window=4": True, "window=99": False, "window=none": False, "rope_theta=100": True, "rope_theta=500000": False,
    "positions=rope": False, "learned-positions": True, "positions=sinusoidal": True, "positions=alibi": True,
    "no-positions": True,
}
ON_GPT2 = {
    "n_kv_heads=2": True, "n_heads=4": True, "head_dim=12": True, "hidden=60": True, "ffn=40": True, "n_layers=1": True,
    "tie=true": False, "untie": True, "gelu": True, "silu": True, "activation=gelu_tanh": False, "gate": True,
    "no-gate": False, "rmsnorm": True, "layernorm": False, "no-biases": True, "biases": False, "context=32": False,
    "dropout=0": False, "window=4": True, "positions=rope": True, "positions=learned": False, "positions=alibi": True,
    "positions=sinusoidal": True, "positions=none": True,
}
ON_MIXTURE = {"expert_ffn=40": True, "n_experts=7": True, "top_k=1": True, "top_k=2": False, "gelu": True,
              "no-gate": True, "biases": True}
CASES = [(name, edit, differs) for name, table in (("llama", ON_LLAMA), ("gpt2", ON_GPT2), ("mixtral", ON_MIXTURE))
         for edit, differs in table.items()]


def weights(model: Model, held: dict[str, Tensor], networks: ModuleType) -> dict[str, Tensor]:
    """The held tensors, or their first rows, where `model` has them in that shape, else drawn ones."""
    out = networks.drawn(model)
    for name, t in out.items():
        old = held.get(name, t)[: len(t)]
        out[name] = old if old.shape == t.shape else t
    return dict(out)


def test_every_edit_is_tried() -> None:
    tried = {edit.partition("=")[0].replace("-", "_") for _, edit, _ in CASES}
    names = {e.name: {e.name, *e.words, *(f for f, _ in e.flags)} for e in edits.EDITS}
    assert [n for n, words in names.items() if not words & tried] == []


@pytest.mark.parametrize(("name", "edit", "differs"), CASES)
def test_an_edited_model_runs(name: str, edit: str, differs: bool, networks: ModuleType) -> None:
    g = networks.golden(name)
    model = edits.apply(g.model, edit)
    net = networks.network(model, weights(model, g.tensors, networks))
    got = net(g.ids)
    assert got.shape == (1, 24, model.embed.vocab)
    assert torch.isfinite(got).all()
    assert networks.off(networks.pieces(net, g.ids, [9, *range(13, 24)]), got) < 1e-4
    assert {n for n, _ in net.named_parameters()} == {t.name for t in model.tensors() if t.kind == "param"}
    moved = networks.off(got[0], g.want)
    assert moved > 2 * networks.CLOSE if differs else moved < networks.CLOSE


def test_fewer_words(networks: ModuleType) -> None:
    g = networks.golden("llama")
    model = edits.apply(g.model, "vocab=90")
    cut = {k: v[:90] if k in ("embed.weight", "head.weight") else v for k, v in g.tensors.items()}
    ids = g.ids % 90
    assert networks.off(networks.network(model, cut)(ids), g.net(ids)[..., :90]) < 1e-5


def test_a_shorter_table_of_positions_refuses_longer_texts(networks: ModuleType) -> None:
    g = networks.golden("gpt2")
    model = edits.apply(g.model, "context=20")
    held = {**g.tensors, "pos_embed.weight": g.tensors["pos_embed.weight"][:20]}
    net = networks.network(model, held)
    assert networks.off(net(g.ids[:, :20])[0], g.want[:20]) < networks.CLOSE
    with pytest.raises(InputRefused, match="24 tokens, but the position table ends at 20"):
        net(g.ids)


# --- the same change in transformers' config

CONFIGS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "rope_theta=1000", {"rope_theta": 1000.0}), ("llama", "gelu", {"hidden_act": "gelu"}),
    ("llama", "gelu_tanh", {"hidden_act": "gelu_pytorch_tanh"}), ("llama", "relu", {"hidden_act": "relu"}),
    ("llama", "activation=relu2", {"hidden_act": "relu2"}), ("llama", "activation=tanh", {"hidden_act": "tanh"}),
    ("llama", "activation=quick_gelu", {"hidden_act": "quick_gelu"}),
    ("llama", "activation=sigmoid", {"hidden_act": "sigmoid"}),
    ("llama", "n_kv_heads=1", {"num_key_value_heads": 1}), ("llama", "n_kv_heads=6", {"num_key_value_heads": 6}),
    ("llama", "n_heads=4", {"num_attention_heads": 4}), ("llama", "head_dim=16", {"head_dim": 16}),
    ("llama", "ffn=40", {"intermediate_size": 40}), ("llama", "hidden=60", {"hidden_size": 60}),
    ("llama", "n_layers=2", {"num_hidden_layers": 2}), ("llama", "vocab=50", {"vocab_size": 50}),
    ("llama", "tie", {"tie_word_embeddings": True}),
    ("llama", "biases", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", "window=5", {"sliding_window": 5}), ("mistral", "window=none", {"sliding_window": None}),
    ("gpt2", "relu", {"activation_function": "relu"}), ("gpt2", "gelu", {"activation_function": "gelu"}),
    ("gpt2", "ffn=40", {"n_inner": 40}), ("gpt2", "n_heads=3", {"n_head": 3, "n_embd": 24}),
    ("gpt2", "context=30", {"n_positions": 30}), ("mixtral", "top_k=1", {"num_experts_per_tok": 1}),
    ("mixtral", "n_experts=3", {"num_local_experts": 3}), ("mixtral", "expert_ffn=40", {"intermediate_size": 40}),
    ("gemma2", "rope_theta=500", {"rope_theta": 500.0}), ("falcon-rw", "n_layers=1", {"num_hidden_layers": 1}),
]


@pytest.mark.parametrize(("name", "edit", "changes"), CONFIGS)
def test_an_edit_is_the_same_change_of_the_config(name: str, edit: str, changes: dict[str, Any], networks: ModuleType
                                                   ) -> None:
    said = networks.config(name, **changes)
    hf = networks.theirs(said)
    described = arch.describe(said, name)
    model = edits.apply(networks.golden(name).model, edit)
    if "n_embd" in changes:
        model = edits.apply(model, f"hidden={changes['n_embd']}")
        model = edits.apply(model, f"ffn={4 * changes['n_embd']}")
    net = networks.network(model, networks.canonical(described, networks.stored(hf)))
    ids = networks.golden(name).ids % model.embed.vocab
    assert networks.off(net(ids), networks.logits(hf, ids)) < networks.CLOSE


def edited(model: Model, *texts: str) -> Model:
    for text in texts:
        model = edits.apply(model, text)
    return model


def rows_of(said: dict[str, Any], model: Model, networks: ModuleType) -> tuple[Tensor, Tensor]:
    """Logits of `model` with the weights that transformers drew for another family's config, and transformers' own."""
    hf = networks.theirs(said)
    held = networks.canonical(arch.describe(said, "x"), networks.stored(hf))
    ids = networks.golden("llama").ids
    return networks.network(model, held)(ids), networks.logits(hf, ids)


def test_llama_with_layernorm_is_stablelm(networks: ModuleType) -> None:
    said = networks.config("stablelm", use_qkv_bias=False, partial_rotary_factor=1.0, head_dim=...)
    model = arch.describe(networks.config("llama", head_dim=8, rope_theta=10000.0), "x")
    ours, want = rows_of(said, edited(model, "layernorm"), networks)
    assert networks.off(ours, want) < networks.CLOSE


def test_llama_without_gate_and_with_layernorm_and_biases_is_starcoder2(networks: ModuleType) -> None:
    said = networks.config("starcoder2", sliding_window=None)
    model = arch.describe(networks.config("llama", head_dim=8, rope_theta=10000.0), "x")
    ours, want = rows_of(said, edited(model, "no-gate", "layernorm", "biases", "gelu_tanh", "tie"), networks)
    assert networks.off(ours, want) < networks.CLOSE


def test_the_way_from_gpt2_to_llama(networks: ModuleType) -> None:
    said = networks.config("llama", head_dim=8, intermediate_size=192, rope_theta=10000.0)
    model = edited(networks.golden("gpt2").model, "positions=rope", "rmsnorm", "gate", "silu", "no-biases", "untie",
                   "n_kv_heads=2")
    ours, want = rows_of(said, model, networks)
    assert networks.off(ours, want) < networks.CLOSE


# --- what transformers' Llama can be led to: no rotation, another bias on scores, rows added to the embedding


@pytest.mark.parametrize("kind", ["none", "alibi", "sinusoidal", "learned"])
def test_other_positions(kind: str, networks: ModuleType) -> None:
    g = networks.golden("llama")
    hf = networks.theirs(networks.config("llama"))
    model = edits.apply(g.model, f"positions={kind}")
    held = weights(model, g.tensors, networks)
    at = torch.arange(24)
    bias = added = None
    if kind == "alibi":
        bias = torch.tensor(alibi_slopes(6))[:, None, None] * (at[None] - at[:, None])
    elif kind == "learned":
        added = held["pos_embed.weight"][:24]
    elif kind == "sinusoidal":
        angle = at[:, None] / 10000 ** (torch.arange(0, 48, 2) / 48)
        added = torch.stack((angle.sin(), angle.cos()), -1).flatten(1)
    want = networks.led(hf, g.ids, bias=bias, added=added)
    assert networks.off(networks.network(model, held)(g.ids), want) < networks.CLOSE


# --- KV heads


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_copied_kv_heads_give_the_same(name: str, networks: ModuleType) -> None:
    """Each KV head given to every query head of its group: MHA with the same logits."""
    g = networks.golden(name)
    part = g.model.layers[0].attn
    assert isinstance(part, Attention)
    model = edits.apply(g.model, f"n_kv_heads={part.n_heads}")
    held = dict(g.tensors)
    for k, w in held.items():
        if ".attn.k." in k or ".attn.v." in k:
            rows = w.unflatten(0, (-1, part.head_dim))
            held[k] = rows.repeat_interleave(part.n_heads // part.n_kv_heads, 0).flatten(0, 1)
    net = networks.network(model, held)
    assert networks.off(net(g.ids), g.net(g.ids)) < 1e-5
    wrong = {k: w.unflatten(0, (-1, part.head_dim)).roll(1, 0).flatten(0, 1) if ".attn.k." in k else w
             for k, w in held.items()}
    assert networks.off(networks.network(model, wrong)(g.ids), g.net(g.ids)) > 1e-2


# --- what cannot be edited or run


@pytest.mark.parametrize(("name", "edit", "word"), [
    ("llama", "n_kv_heads=4", "cannot share"), ("llama", "n_heads=5", "cannot share"),
    ("deepseek_v3", "n_kv_heads=1", "latent"), ("deepseek_v3", "window=8", "latent"),
    ("gpt2", "rope_theta=5", "no RoPE"), ("llama", "top_k=1", "no experts"), ("mixtral", "ffn=9", "no dense"),
    ("mixtral", "top_k=9", "9 experts per token of 5"), ("gemma2", "n_layers=9", "guess"),
    ("llama", "activation=gegelu", "not one of"), ("llama", "positions=random", "not one of"),
])
def test_what_an_edit_cannot_do_is_refused(name: str, edit: str, word: str, networks: ModuleType) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        edits.apply(networks.golden(name).model, edit)
    assert caught.value.code == "edit"


@pytest.mark.parametrize(("name", "edit", "word"), [
    ("mamba", "rmsnorm", "state-space"), ("jamba", "gelu", "state-space"), ("gpt_oss", "no-gate", "'swigluoai'"),
    ("deepseek_v3", "n_experts=7", "in 4 groups"), ("gemma3n", "gelu", "altup"),
])
def test_what_an_edited_model_cannot_compute_is_refused(name: str, edit: str, word: str, networks: ModuleType) -> None:
    model = edits.apply(arch.describe(networks.config(name), name), edit)
    with pytest.raises(InputRefused, match=word) as caught:
        build(model)
    assert caught.value.code == "not-runnable"
    assert caught.value.help


VALUES = ("1", "2", "3", "7", "none", "true", "false", "alibi", "learned", "rope", "sinusoidal", "layer", "relu")


@pytest.mark.parametrize("edit", [e.name for e in edits.EDITS])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral", "falcon", "deepseek_v3", "cohere-qk-norm",
                                  "llama4_text", "phi", "olmo2"])
def test_an_edit_runs_or_is_refused(name: str, edit: str, networks: ModuleType) -> None:
    """No value of an edit leads to anything but numbers or one clear line."""
    base = networks.golden(name).model
    base = replace(base, layers=base.layers[-2:])
    ran, refused = 0, set()
    for value in VALUES:
        try:
            model = edits.apply(base, f"{edit}={value}")
            net = networks.network(model, networks.drawn(model))
        except LlamactlError as e:
            refused.add(e.code)
            continue
        ids = torch.tensor([[1, 0, 2, 3, 1]]) % model.embed.vocab
        if edit == "context":
            ids = ids[:, : model.context.usable]
        whole = net(ids)
        assert torch.isfinite(whole).all(), value
        assert networks.off(networks.pieces(net, ids, range(1, ids.shape[1])), whole) < 1e-3, value
        ran += 1
    assert ran or (name, edit) in NEVER
    assert refused <= {"edit", "not-runnable"}


NEVER = {  # no such part here, or a choice of groups that these values do not fit
    *((name, edit) for name in ("llama", "gpt2", "gemma2", "falcon", "cohere-qk-norm", "phi", "olmo2")
      for edit in ("expert_ffn", "n_experts", "top_k")),
    *(("deepseek_v3", edit) for edit in ("n_kv_heads", "n_heads", "head_dim", "hidden", "ffn", "n_experts", "biases",
                                         "window", "positions")),
    ("gpt2", "rope_theta"), ("mixtral", "ffn"),
}
