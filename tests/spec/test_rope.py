"""RoPE and context as configs spell them: old and new keys, stretched or not, by layer type, partial, refused."""

from __future__ import annotations

from typing import Any

import pytest

from llamactl import arch
from llamactl.errors import InputRefused
from llamactl.spec.config import Config
from llamactl.spec.model import Context, Model
from llamactl.spec.parts import Attention
from llamactl.spec.rope import Rope, RopeScaling
from llamactl.spec.ropeconfig import partial_factor, read_context, read_rope

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "tie_word_embeddings": False,
}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}


def describe(**keys: Any) -> Model:
    return arch.describe({**LLAMA, **keys}, "config.json")


def rope(**keys: Any) -> Rope:
    """The rotation of the first layer."""
    found = describe(**keys).layers[0].attn.rope
    assert found is not None
    return found


def scaling(**keys: Any) -> RopeScaling:
    found = rope(**keys).scaling
    assert found is not None
    return found


def spans(**keys: Any) -> tuple[int | None, int | None]:
    context = describe(**keys).context
    return context.trained, context.usable


# --- theta


def test_theta_at_the_top_in_the_block_and_by_default() -> None:
    assert rope().theta == 10000.0
    assert rope(rope_theta=500000).theta == 500000.0
    assert rope(rope_parameters={"rope_type": "default", "rope_theta": 1e6}).theta == 1e6
    assert rope(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}).theta == 1e6
    assert rope(rotary_emb_base=20000).theta == 20000.0


@pytest.mark.parametrize(("family", "theta"), [
    ("mixtral", 1e6), ("smollm3", 2e6), ("gpt_oss", 150000.0), ("llama", 10000.0), ("qwen2", 10000.0),
])
def test_theta_default_is_the_familys_own(family: str, theta: float) -> None:
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2}
    assert rope(model_type=family, **extra).theta == theta


# --- the stretched lengths


def test_yarn_whose_maximum_is_the_stretched_length_already() -> None:
    """Case 25: 4,096 x 40 = 163,840 is max_position_embeddings itself and is not multiplied again."""
    block = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.707,
             "original_max_position_embeddings": 4096}
    assert spans(max_position_embeddings=163840, rope_scaling=block) == (4096, 163840)
    s = scaling(max_position_embeddings=163840, rope_scaling=block)
    assert (s.kind, s.factor, s.original) == ("yarn", 40.0, 4096)
    assert (s.beta_fast, s.beta_slow, s.mscale, s.mscale_all_dim, s.truncate) == (32.0, 1.0, 1.0, 0.707, True)


def test_latent_attention_rotates_its_own_width() -> None:
    """Case 25 again: the rotated width is qk_rope_head_dim, not hidden / heads."""
    model = arch.describe({
        **LLAMA, "model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "first_k_dense_replace": 1, "max_position_embeddings": 512, "rope_theta": 10000,
    }, "config.json")
    found = model.layers[0].attn.rope
    assert found is not None
    assert (found.dim, found.theta, found.pairs) == (6, 10000.0, "adjacent")


def test_yarn_whose_maximum_is_still_the_trained_length() -> None:
    """Case 27: a block added by the user; the window that is switched off limits nothing."""
    block = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    keys = {"model_type": "qwen2", "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_scaling": block,
            "sliding_window": 131072, "use_sliding_window": False}
    assert spans(**keys) == (32768, 131072)
    assert scaling(**keys).beta_fast == 32.0
    assert scaling(**keys).beta_slow == 1.0
    assert {layer.attn.cache().window for layer in describe(**keys).layers} == {None}


def test_yarn_whose_maximum_is_the_trained_length_and_room_for_an_answer() -> None:
    """Qwen3's files say 40,960 = 32,768 + 8,192; with the model card's block they reach 32,768 x 4."""
    block = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert spans(max_position_embeddings=40960, rope_scaling=block) == (32768, 131072)


def test_yarn_without_an_original_length() -> None:
    """Trained is then what the maximum says."""
    assert spans(max_position_embeddings=2048, rope_scaling={"type": "yarn", "factor": 4.0}) == (2048, 8192)


def test_llama3_bands() -> None:
    """Case 28: the maximum is the stretched length whatever the factor."""
    keys = {"max_position_embeddings": 131072, "rope_theta": 500000.0, "rope_scaling": LLAMA3}
    assert spans(**keys) == (8192, 131072)
    s = scaling(**keys)
    assert s == RopeScaling(kind="llama3", factor=32.0, original=8192, low_freq_factor=1.0, high_freq_factor=4.0)


@pytest.mark.parametrize("gone", ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_llama3_needs_every_field(gone: str) -> None:
    block = {k: v for k, v in LLAMA3.items() if k != gone}
    with pytest.raises(InputRefused, match=gone) as caught:
        describe(max_position_embeddings=131072, rope_scaling=block)
    assert caught.value.code == "config-missing"


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_old_spelling_type(kind: str) -> None:
    """Case 29: `type`, no rope_theta; the maximum is the trained length and is multiplied."""
    keys = {"max_position_embeddings": 4096, "rope_scaling": {"type": kind, "factor": 4.0}}
    assert spans(**keys) == (4096, 16384)
    assert (scaling(**keys).kind, scaling(**keys).factor, rope(**keys).theta) == (kind, 4.0, 10000.0)
    with pytest.raises(InputRefused, match=r"rope_scaling\.factor is missing"):
        describe(max_position_embeddings=4096, rope_scaling={"type": kind})


def test_both_spellings_at_once() -> None:
    """Files that were written twice carry both; where they differ the newer key counts."""
    assert scaling(max_position_embeddings=64, rope_scaling={"type": "linear", "rope_type": "linear", "factor": 2.0})
    s = scaling(max_position_embeddings=64, rope_scaling={"type": "linear", "rope_type": "dynamic", "factor": 2.0})
    assert s.kind == "dynamic"


def test_rope_parameters_block() -> None:
    """Case 30: neither rope_theta nor rope_scaling nor torch_dtype, as transformers 5 writes files."""
    keys = {"max_position_embeddings": 131072, "dtype": "bfloat16",
            "rope_parameters": {**LLAMA3, "factor": 8.0, "rope_theta": 500000.0}}
    assert rope(**keys).theta == 500000.0
    assert (scaling(**keys).kind, scaling(**keys).factor) == ("llama3", 8.0)
    assert spans(**keys) == (8192, 131072)
    assert describe(**keys).dtype == "bf16"


GEMMA3: dict[str, Any] = {"model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 16, "sliding_window": 8,
                          "max_position_embeddings": 131072}


def by_kind(model: Model) -> dict[bool, set[tuple[float, str | None, float | None]]]:
    """{slides: {(theta, scheme, factor)}}."""
    out: dict[bool, set[tuple[float, str | None, float | None]]] = {}
    for layer in model.layers:
        assert isinstance(layer.attn, Attention)
        assert layer.attn.rope is not None
        s = layer.attn.rope.scaling
        key = (layer.attn.rope.theta, s.kind if s else None, s.factor if s else None)
        out.setdefault(layer.attn.window is not None, set()).add(key)
    return out


@pytest.mark.parametrize("spelling", [
    {"rope_theta": 1e6, "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }},
])
def test_two_ropes_by_layer_type(spelling: dict[str, Any]) -> None:
    """Case 31: window layers at base 10,000 unscaled, full layers at 1e6 divided by 8; the maximum is final."""
    model = describe(**GEMMA3, **spelling)
    assert by_kind(model) == {True: {(10000.0, None, None)}, False: {(1e6, "linear", 8.0)}}
    assert model.context.usable == 131072


def test_two_ropes_by_default() -> None:
    assert by_kind(describe(**GEMMA3)) == {True: {(10000.0, None, None)}, False: {(1e6, None, None)}}


OLMO3: dict[str, Any] = {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 8,
                         "max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}


def test_stretching_of_the_full_layers_only() -> None:
    model = describe(**OLMO3, rope_theta=500000, rope_scaling=YARN)
    assert by_kind(model) == {True: {(500000.0, None, None)}, False: {(500000.0, "yarn", 4.0)}}


def test_olmo3_bases_by_layer_type() -> None:
    model = describe(**OLMO3, rope_parameters={
        "full_attention": {**YARN, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    })
    assert by_kind(model) == {True: {(10000.0, None, None)}, False: {(500000.0, "yarn", 4.0)}}


def test_a_split_block_in_a_family_with_one_rope_is_refused() -> None:
    """Passing it over would turn the base into a default."""
    with pytest.raises(InputRefused, match="by layer type") as caught:
        describe(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 500000.0}})
    assert caught.value.code == "config-rope"


# --- partial rotation


@pytest.mark.parametrize(("keys", "dims"), [
    ({"model_type": "phi", "partial_rotary_factor": 0.4, "hidden_size": 2560, "num_attention_heads": 32}, 32),
    ({"model_type": "phi"}, 8),
    ({"model_type": "gpt_neox", "rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_size": 2048,
      "num_attention_heads": 8}, 64),
    ({"model_type": "gpt_neox", "rotary_pct": 1.0}, 16),
    ({"model_type": "stablelm"}, 4),
    ({"model_type": "stablelm", "rope_pct": 0.5}, 8),
    ({"model_type": "phi3", "partial_rotary_factor": 0.75, "num_key_value_heads": 4}, 12),
    ({"model_type": "phi3", "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, 8),
    ({}, 16),
])
def test_rotated_dimensions(keys: dict[str, Any], dims: int) -> None:
    """Case 32, and 37's block: a share of each head, 2560 / 32 x 0.4 = 32 and 2048 / 8 x 0.25 = 64."""
    assert rope(**keys).dim == dims


@pytest.mark.parametrize("factor", [0.01, 0.2])
def test_rotation_needs_an_even_width(factor: float) -> None:
    with pytest.raises(InputRefused, match="needs an even number") as caught:
        describe(model_type="phi", partial_rotary_factor=factor)
    assert caught.value.code == "config-rope"


def test_partial_factor_is_at_most_the_whole_head() -> None:
    with pytest.raises(InputRefused, match="outside 0..1") as caught:
        describe(model_type="phi", partial_rotary_factor=1.5)
    assert caught.value.code == "config-range"
    assert partial_factor(Config({"rotary_pct": 0.5}, "c"), 0.25, "rotary_pct") == 0.5
    assert partial_factor(Config({}, "c"), 0.25, "rotary_pct") == 0.25


# --- longrope


def longrope(**changes: Any) -> dict[str, Any]:
    """A Phi-3 file of 8 pairs; None takes a field out of the block."""
    block = {"type": "su", "short_factor": [1.0 + 0.1 * j for j in range(8)],
             "long_factor": [1.0 + j for j in range(8)], **changes}
    return {"model_type": "phi3", "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096, "rope_scaling": {k: v for k, v in block.items() if v is not None}}


@pytest.mark.parametrize("word", ["su", "longrope"])
def test_longrope_under_both_names(word: str) -> None:
    """Case 34: two tables, and the trained length at the top level."""
    keys = longrope(type=word)
    s = scaling(**keys)
    assert (s.kind, s.original, s.factor) == ("longrope", 4096, None)
    assert s.short == tuple(1.0 + 0.1 * j for j in range(8))
    assert s.long == tuple(1.0 + j for j in range(8))
    assert spans(**keys) == (4096, 131072)


@pytest.mark.parametrize(("changes", "code", "words"), [
    ({"short_factor": None}, "config-missing", "short_factor"),
    ({"long_factor": [1.0] * 7}, "config-rope", "7 entries for 8 pairs"),
    ({"long_factor": "x"}, "config-type", "not a list of numbers"),
    ({"long_factor": [True] * 8}, "config-type", "not a list of numbers"),
])
def test_longrope_tables_are_checked(changes: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(InputRefused, match=words) as caught:
        describe(**longrope(**changes))
    assert caught.value.code == code


# --- what is no scaling, and what is no context


@pytest.mark.parametrize("spelling", [
    {"rope_parameters": {"rope_theta": 1e6, "partial_rotary_factor": 1.0, "rope_type": "default"}},
    {"rope_scaling": {"rope_type": "default"}}, {"rope_scaling": {"type": "default"}}, {"rope_scaling": None},
    {"rope_scaling": {}}, {"rope_parameters": None}, {},
])
def test_a_default_block_scales_nothing(spelling: dict[str, Any]) -> None:
    """Case 37."""
    assert rope(max_position_embeddings=202752, **spelling).scaling is None
    assert spans(max_position_embeddings=202752, **spelling) == (202752, 202752)


@pytest.mark.parametrize(("on", "first", "sliding"), [(False, 4, 0), (True, 4, 2), (True, 0, 6), (True, 6, 0)])
def test_a_window_is_not_the_context(on: bool, first: int, sliding: int) -> None:
    """Case 35: the layers from max_window_layers upwards slide, if the switch is on; the context stays."""
    model = describe(model_type="qwen3", head_dim=16, num_hidden_layers=6, max_position_embeddings=262144,
                     use_sliding_window=on, sliding_window=4096, max_window_layers=first)
    windows = [layer.attn.cache().window for layer in model.layers]
    assert windows == [None] * (6 - sliding) + [4096] * sliding
    assert model.context == Context(trained=262144, usable=262144, why="max_position_embeddings")


def test_context_named_nowhere() -> None:
    assert spans() == (None, None)
    assert spans(rope_scaling=LLAMA3) == (None, None)
    assert describe().context.why == "the config names no length"


def test_context_of_learned_positions_and_sines() -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 24, "n_layer": 1, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    assert arch.describe(gpt2, "c").context.usable == 32
    table = {"model_type": "transformer", "hidden_size": 24, "num_attention_heads": 4, "intermediate_size": 8,
             "num_hidden_layers": 1, "vocab_size": 50}
    assert arch.describe(table, "c").context.usable is None


def test_read_context_alone() -> None:
    cfg = Config({"max_position_embeddings": 100}, "c")
    linear = Rope(dim=4, theta=1e4, scaling=RopeScaling(kind="linear", factor=2.5))
    assert read_context(cfg, linear).usable == 250
    assert read_context(cfg, linear, final=True).usable == 100
    assert read_context(cfg, None).usable == 100
    assert read_context(Config({}, "c"), None, default=7).usable == 7


# --- refused


@pytest.mark.parametrize(("word", "near"), [("yarnn", "yarn"), ("lama3", "llama3"), ("linaer", "linear")])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_unknown_scheme_names_a_near_one(word: str, near: str, key: str) -> None:
    with pytest.raises(InputRefused, match=f"'{word}', not a known scheme") as caught:
        describe(rope_scaling={key: word, "factor": 2.0})
    assert caught.value.code == "config-rope"
    assert caught.value.help == f"did you mean {near!r}?"


@pytest.mark.parametrize("word", [3, ["yarn"], True, "\u4e2d"])
def test_a_scheme_that_is_no_known_word(word: Any) -> None:
    with pytest.raises(InputRefused, match="not a known scheme") as caught:
        describe(rope_scaling={"rope_type": word, "factor": 2.0})
    assert caught.value.code == "config-rope"


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("value", ["linear", 2.0, True, ["linear"]])
def test_a_block_that_is_no_object(key: str, value: Any) -> None:
    with pytest.raises(InputRefused, match=f"{key} is .*, not an object") as caught:
        describe(**{key: value})
    assert caught.value.code == "config-type"


@pytest.mark.parametrize("factor", [0, -1.0, "4", None, float("nan")])
def test_factor_is_a_positive_number(factor: Any) -> None:
    with pytest.raises(InputRefused, match="factor"):
        describe(rope_scaling={"rope_type": "linear", "factor": factor})


def test_a_factor_needs_a_scheme() -> None:
    with pytest.raises(InputRefused, match="without a rope_type") as caught:
        describe(rope_scaling={"factor": 2.0})
    assert caught.value.code == "config-rope"


def test_pairs_and_default_theta_are_the_callers() -> None:
    found = read_rope(Config({}, "c"), 8, theta=7.0, pairs="adjacent")
    assert found == Rope(dim=8, theta=7.0, pairs="adjacent")
