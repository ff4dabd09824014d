"""The 2017 block against PyTorch's own layer of that paper, built here from the same weights."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llamactl import arch
from llamactl.net.decoder import Decoder

SAID: dict[str, Any] = {"model_type": "transformer", "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3,
                        "num_attention_heads": 6, "vocab_size": 97, "layer_norm_eps": 1e-5}


def pair(networks: ModuleType, **changes: Any) -> tuple[Decoder, list[nn.TransformerEncoderLayer], dict[str, Tensor]]:
    """(our network, PyTorch's layers, the weights of both). Projections of attention have no biases in the paper."""
    said = SAID | changes
    model = arch.describe(said, "x")
    held: dict[str, Tensor] = networks.drawn(model)
    layers = []
    for i in range(model.n_layers):
        layer = nn.TransformerEncoderLayer(48, said["num_attention_heads"], said["intermediate_size"], dropout=0.0,
                                           activation=said.get("hidden_act", "relu"), layer_norm_eps=1e-5,
                                           batch_first=True, norm_first=False).eval()
        at = f"layers.{i}."
        given = {
            "self_attn.in_proj_weight": torch.cat([held[f"{at}attn.{x}.weight"] for x in "qkv"]),
            "self_attn.in_proj_bias": torch.zeros(144), "self_attn.out_proj.weight": held[f"{at}attn.o.weight"],
            "self_attn.out_proj.bias": torch.zeros(48), "linear1.weight": held[f"{at}mlp.up.weight"],
            "linear1.bias": held[f"{at}mlp.up.bias"], "linear2.weight": held[f"{at}mlp.down.weight"],
            "linear2.bias": held[f"{at}mlp.down.bias"],
            **{f"norm{n}.{x}": held[f"{at}{name}.{x}"] for n, name in ((1, "attn_post_norm"), (2, "mlp_post_norm"))
               for x in ("weight", "bias")},
        }
        layer.load_state_dict(given)
        layers.append(layer)
    return networks.network(model, held), layers, held


def paper(layers: list[nn.TransformerEncoderLayer], table: Tensor, ids: Tensor, head: Tensor) -> Tensor:
    """Section 3.4: rows of the table times sqrt(d); 3.5: sines and cosines, one by one; the head is the table."""
    t, d = ids.shape[1], table.shape[1]
    places = torch.empty(t, d)
    for at in range(t):
        for i in range(0, d, 2):
            angle = at / 10000 ** (i / d)
            places[at, i], places[at, i + 1] = math.sin(angle), math.cos(angle)
    x = table[ids] * math.sqrt(d) + places
    mask = nn.Transformer.generate_square_subsequent_mask(t)
    with torch.no_grad():
        for layer in layers:
            x = layer(x, src_mask=mask, is_causal=True)
    return x @ head.T


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 1}, {"hidden_act": "gelu"}, {"num_hidden_layers": 1},
                                     {"tie_word_embeddings": False}], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 24, 90])
def test_logits(changes: dict[str, Any], tokens: int, networks: ModuleType) -> None:
    net, layers, held = pair(networks, **changes)
    ids = torch.randint(0, 97, (2, tokens), generator=torch.Generator().manual_seed(1))
    head = held.get("head.weight", held["embed.weight"])
    want = paper(layers, held["embed.weight"], ids, head)
    assert networks.off(net(ids), want) < 1e-4
    assert networks.off(networks.pieces(net, ids, [tokens // 2, *range(max(1, tokens - 4), tokens)]
                                        if tokens > 1 else []), want) < 1e-4


def test_a_norm_before_the_branch_is_another_block(networks: ModuleType) -> None:
    """The same weights in the later order give other logits, so that the order is really looked at."""
    net, layers, held = pair(networks)
    for layer in layers:
        layer.norm_first = True
    ids = torch.arange(12)[None]
    assert networks.off(net(ids), paper(layers, held["embed.weight"], ids, held["embed.weight"])) > 0.1
