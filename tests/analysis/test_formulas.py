"""Formulas of the drawing: what a model multiplies, caps and adds stands in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llamactl.analysis.formulas import embedding, logits, softmax
from llamactl.analysis.outline import outline
from llamactl.api import load


@pytest.mark.parametrize(("name", "start", "weights", "end"), [
    ("gpt2", "E[token]", "softmax(q k^T / sqrt(d_head))", "E x"),
    ("llama-3-8b", "E[token]", "softmax(q k^T / sqrt(d_head))", "W x"),
    ("gemma-2-27b", "67.8823 E[token]", "softmax(50 tanh(0.0833333 q k^T / 50))", "30 tanh(E x / 30)"),
    ("gemma-2-9b", "59.8665 E[token]", "softmax(50 tanh((q k^T / sqrt(d_head)) / 50))", "30 tanh(E x / 30)"),
    ("gemma-3-27b", "73.3212 E[token]", "softmax(0.0771517 q k^T)", "E x"),
    ("deepseek-v3", "E[token]", "softmax(0.135234 q k^T)", "W x"),
    ("deepseek-v2-lite", "E[token]", "softmax(0.114721 q k^T)", "W x"),
    ("gpt-oss-20b", "E[token]", "softmax([q k^T / sqrt(d_head), sink])[:-1]", "W x"),
    ("phi-2", "E[token]", "softmax(q k^T / sqrt(d_head))", "W x + b"),
    ("transformer-base", "22.6274 E[token]", "softmax(q k^T / sqrt(d_head))", "E x"),
])
def test_formulas(name: str, start: str, weights: str, end: str) -> None:
    model = load(name).model
    attn = model.layers[0].attn
    assert attn is not None
    assert (embedding(model), softmax(attn), logits(model)) == (start, weights, end)
    parts = outline(model).parts
    assert [parts[k].fill for k in ("embed", "attn", "head")] == [start, weights, end]


def test_a_head_of_every_kind() -> None:
    model = load("phi-2").model
    head = replace(model.head, scale=0.5, softcap=30.0)
    assert logits(replace(model, head=head)) == "30 tanh((0.5 (W x + b)) / 30)"
    assert logits(replace(model, head=replace(model.head, bias=False, unit_rows=True))) == "(W / row lengths) x"
    assert logits(replace(model, head=replace(model.head, bias=False, scale=1.0))) == "W x"
