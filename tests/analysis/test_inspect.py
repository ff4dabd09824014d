"""Stored names and shapes against a description: prefixes, heads, buffers, leftovers, layers that are not counted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from llamactl import arch
from llamactl.analysis.inspect import InspectReport, inspect
from llamactl.analysis.inventory import Inventory
from llamactl.spec.model import Model
from llamactl.spec.naming import stored_tensors
from llamactl.spec.prefixes import LANGUAGE, VISION, WRAPPERS, renamed, then

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
BYTES = {"F32": 4, "BF16": 2, "U8": 1}


@dataclass(frozen=True)
class W:
    """A weight as a file has it."""

    name: str
    shape: tuple[int, ...] | None
    dtype: str = "F32"
    stored: str = ""
    container: str | None = None
    bits: int | None = None
    turned: bool = False
    elements: int = 0
    nbytes: int = 0


def w(name: str, shape: tuple[int, ...], dtype: str = "F32", **more: Any) -> W:
    n = prod(shape)
    return W(name=name, shape=shape, dtype=dtype, elements=n, nbytes=n * BYTES[dtype], **{"stored": name, **more})


def golden(name: str) -> tuple[Model, dict[str, tuple[int, ...]]]:
    """A described test model, and names and shapes as llamactl's own table has them."""
    config = json.loads((GOLDEN / name / "config.json").read_text(encoding="utf-8"))
    model = arch.describe(config, name)
    return model, {s.name: s.shape for s in stored_tensors(model, arch.names(model))}


def look(model: Model | None, held: Mapping[str, Any], **more: Any) -> InspectReport:
    weights = tuple(x if isinstance(x, W) else w(n, x) for n, x in held.items())
    found = Inventory(files=(), tensors={x.stored: x for x in weights}, weights=weights, **more)
    if model is None:
        return inspect(found, id="x")
    return inspect(found, id="x", model=model, rules=arch.names(model),
                   ignored=getattr(arch.family(model.family), "IGNORED", ()))


def codes(r: InspectReport) -> set[str]:
    return {code for code, _ in r.notes}


FAMILIES = sorted(d.name for d in GOLDEN.iterdir() if (d / "config.json").is_file())


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_with_itself(name: str) -> None:
    model, held = golden(name)
    r = look(model, held)
    assert (r.agrees, r.clean, r.names, r.missing, r.unexpected) == (True, True, None, (), ())
    assert (r.parameters.config, r.parameters.files, r.parameters.agree) == (model.total(), model.total(), True)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3", "mamba", "deepseek_v3", "gpt_oss"])
def test_one_tensor_more_less_or_larger_is_seen(name: str) -> None:
    model, held = golden(name)
    for victim in list(held)[:: max(1, len(held) // 12)]:
        less = look(model, {n: s for n, s in held.items() if n != victim})
        assert (less.missing, less.agrees, less.clean) == ((victim,), False, False)
        larger = look(model, {**held, victim: (*held[victim][:-1], held[victim][-1] + 1)})
        assert [x.name for x in larger.reshaped] == [victim]
        assert larger.reshaped[0].config == held[victim]
        assert (larger.agrees, larger.parameters.agree) == (False, False) or victim in larger.buffers.names
    more = look(model, {**held, "model.surprise.weight": (3, 5)})
    assert (more.unexpected, more.agrees) == (("model.surprise.weight",), False)
    assert more.parameters.files == model.total() + 15


# ---- prefixes

PREFIXED: dict[str, tuple[str, Callable[[str], str]]] = {
    "no-prefix": ("llama", lambda n: n.removeprefix("model.")),
    "gpt2-no-prefix": ("gpt2", lambda n: n.removeprefix("transformer.")),
    "model-before-everything": ("llama", lambda n: f"model.{n}"),
    "compiled": ("llama", lambda n: f"_orig_mod.{n}"),
    "data-parallel": ("gpt_neox", lambda n: f"module.{n}"),
    "merged-adapter": ("llama", lambda n: f"base_model.model.{n}"),
    "foreign-prefix": ("llama", lambda n: f"transformer.{n}" if n.startswith("model.") else n),
    "embedding-alone": ("llama", lambda n: n.removeprefix("model.") if "embed" in n else n),
    "inside-a-larger-model": ("llama", lambda n: f"language_model.{n}"),
    "transformers-5": ("llama", lambda n: re.sub("^model.", "model.language_model.", n)),
}


@pytest.mark.parametrize("case", PREFIXED)
def test_prefixes_are_normalised_as_a_whole(case: str) -> None:
    name, change = PREFIXED[case]
    model, held = golden(name)
    r = look(model, {change(n): s for n, s in held.items()})
    assert (r.agrees, r.missing, r.unexpected) == (True, (), ())
    assert r.names
    assert "->" in r.names
    assert r.parameters.agree


@pytest.mark.parametrize("tower", ["vision_tower.", "vision_tower.vision_model."])
@pytest.mark.parametrize("nested", ["language_model.model.", "model.language_model."])
def test_gemma_3_under_each_of_its_names(tower: str, nested: str) -> None:
    """Published: vision_tower.vision_model.; transformers 5: vision_tower. alone, everything inside model."""
    model, held = golden("gemma3")
    words = ("vision_model.", ""), ("language_model.model.", "language_model.")
    plain = {n.removeprefix("model.").replace(*words[0]).replace(*words[1]): s for n, s in held.items()}
    outer = "model." if nested.startswith("model.") else ""

    def name(n: str) -> str:
        if n.startswith("language_model."):
            return nested + n.removeprefix("language_model.")
        return outer + (tower + n.removeprefix("vision_tower.") if n.startswith("vision_tower.") else n)

    r = look(model, {name(n): s for n, s in plain.items()})
    assert (r.agrees, r.missing[:3], r.unexpected[:3]) == (True, (), ())


def test_a_fault_under_a_prefix_is_told_under_the_names_of_each_side() -> None:
    model, held = golden("llama")
    bare = {n.removeprefix("model."): s for n, s in held.items() if n != "model.norm.weight"}
    r = look(model, {**bare, "odd.weight": (2,)})
    assert (r.missing, r.unexpected) == (("model.norm.weight",), ("odd.weight",))
    assert r.names


def test_the_plain_names_win_where_no_rewrite_is_better() -> None:
    model, held = golden("llama")
    r = look(model, {**held, "model.model.norm.weight": (3,)})
    assert r.names is None
    assert r.unexpected == ("model.model.norm.weight",)
    assert look(model, {"a.b": (1,), "c": (2,)}).names is None
    assert look(model, {}).missing


def test_a_rewrite_that_makes_two_tensors_one_is_not_used() -> None:
    model, held = golden("llama")
    both = {n.removeprefix("model."): s for n, s in held.items()} | {"model.norm.weight": (3,)}
    r = look(model, both)
    assert r.names is None
    assert len(r.unexpected) + len(held) - len(r.missing) == len(both)


def test_two_rewrites_in_turn_are_one() -> None:
    names = [a + rest for pairs in (*LANGUAGE, *VISION) for a, _ in pairs for rest in ("layers.0.w", "vision_model.x")]
    names += [wrapper + "q.weight" for wrapper in WRAPPERS] + ["lm_head.weight", "norm.weight"]
    for first in LANGUAGE:
        for second in VISION:
            both = then(first, second)
            assert [renamed(n, both) for n in names] == [renamed(renamed(n, first), second) for n in names]


# ---- head, buffers, leftovers, what is not counted


def tied(model: Model, value: bool) -> Model:
    return replace(model, head=replace(model.head, tied=value))


def test_a_tied_head_that_is_stored_is_counted_once() -> None:
    model, held = golden("llama")
    assert held["lm_head.weight"] == held["model.embed_tokens.weight"]
    r = look(tied(model, True), held)
    assert (r.agrees, r.unexpected, codes(r), r.clean) == (True, (), {"weights-tied-head"}, True)
    assert r.parameters.files == r.parameters.config == tied(model, True).total()
    assert r.head
    assert (r.head.stored, r.head.tied, r.head.name) == (True, True, "lm_head.weight")
    without = {n: s for n, s in held.items() if n != "lm_head.weight"}
    r = look(tied(model, True), without)
    assert r.head
    assert (r.agrees, r.head.stored, r.notes) == (True, False, ())


def test_a_head_of_another_size_is_no_copy() -> None:
    model, held = golden("llama")
    r = look(tied(model, True), {**held, "lm_head.weight": (7, 3)})
    assert (r.agrees, r.unexpected) == (False, ("lm_head.weight",))


def test_a_missing_head_of_an_untied_model_is_missing() -> None:
    model, held = golden("llama")
    r = look(model, {n: s for n, s in held.items() if n != "lm_head.weight"})
    assert (r.missing, r.agrees) == (("lm_head.weight",), False)
    assert {"weights-missing", "weights-head"} == codes(r)


def test_buffers_stand_apart() -> None:
    model, held = golden("deepseek_v3")
    r = look(model, held)
    buffers = {n: s for n, s in held.items() if n.endswith("e_score_correction_bias")}
    assert set(r.buffers.names) == set(buffers)
    assert r.buffers.elements == sum(prod(s) for s in buffers.values()) > 0
    assert r.parameters.files == model.total()


LEFTOVERS = {
    "gpt2": {"transformer.h.0.attn.bias": (1, 1, 8, 8), "transformer.h.1.attn.masked_bias": ()},
    "gpt_neox": {"gpt_neox.layers.0.attention.bias": (1, 1, 8, 8), "gpt_neox.layers.1.attention.masked_bias": (),
                 "gpt_neox.layers.0.attention.rotary_emb.inv_freq": (4,)},
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
              "model.layers.1.self_attn.rotary_emb.inv_freq": (4,)},
}


@pytest.mark.parametrize("name", LEFTOVERS)
@pytest.mark.parametrize("bare", [False, True])
def test_known_leftovers_are_named_and_not_counted(name: str, bare: bool) -> None:
    model, held = golden(name)
    both = {**held, **LEFTOVERS[name]}
    if bare:
        both = {re.sub(r"^(model|transformer|gpt_neox)\.", "", n): s for n, s in both.items()}
    r = look(model, both)
    assert (r.agrees, r.clean, r.unexpected) == (True, True, ())
    assert sum(g.tensors for g in r.ignored) == len(LEFTOVERS[name])
    assert r.parameters.files == model.total()
    assert {x for g in r.ignored for x in g.names} <= set(both)


def test_a_bias_that_only_ends_like_a_mask_is_not_dropped() -> None:
    model, held = golden("gpt2")
    r = look(model, {n: s for n, s in held.items() if n != "transformer.h.0.attn.c_attn.bias"})
    assert r.missing == ("transformer.h.0.attn.c_attn.bias",)
    assert look(model, {**held, "transformer.h.0.mlp.bias": (3,)}).unexpected == ("transformer.h.0.mlp.bias",)


def test_drafting_layers_after_the_decoder_are_extra() -> None:
    config = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text(encoding="utf-8"))
    model = arch.describe({**config, "num_nextn_predict_layers": 1}, "x")
    held = {s.name: s.shape for s in stored_tensors(model, arch.names(model))}
    n = model.n_layers
    drafts = {f"model.layers.{n}.eh_proj.weight": (4, 8), f"model.layers.{n}.embed_tokens.weight": (9, 4)}
    r = look(model, {**held, **drafts})
    assert (r.agrees, r.clean, r.unexpected, r.parameters.files) == (True, True, (), model.total())
    (extra,) = r.extra
    assert set(extra.names) == set(drafts)
    assert "multi-token-prediction" in extra.why
    gap = look(model, {**held, f"model.layers.{n + 3}.eh_proj.weight": (4, 8)})
    assert gap.unexpected == (f"model.layers.{n + 3}.eh_proj.weight",)
    plain, held = golden("llama")
    after = f"model.layers.{plain.n_layers}.input_layernorm.weight"
    assert look(plain, {**held, after: (4,)}).unexpected == (after,)


def test_a_tower_that_the_config_does_not_describe_is_extra() -> None:
    config = json.loads((GOLDEN / "gemma3" / "config.json").read_text(encoding="utf-8"))
    del config["vision_config"]
    model = arch.describe(config, "x")
    _, held = golden("gemma3")
    r = look(model, held)
    assert (r.unexpected, r.missing, r.agrees, r.parameters.agree) == ((), (), True, True)
    assert r.extra[0].tensors > 10


# ---- containers and dtypes


def packed(held: Mapping[str, tuple[int, ...]], kind: str = "gptq", *, turned: bool = True, part: str = "proj",
           shape: bool = True) -> dict[str, W]:
    out = {}
    for n, s in held.items():
        if part not in n:
            out[n] = w(n, s)
            continue
        one = w(n, s, "U8", container=kind, bits=4, turned=turned, stored=n.replace(".weight", ".qweight"))
        out[n] = one if shape else replace(one, shape=None)
    return out


def test_packed_weights_are_counted_as_weights() -> None:
    model, held = golden("llama")
    for shape in (True, False):
        r = look(model, packed(held, shape=shape), quantization="gptq")
        assert (r.agrees, r.clean, r.parameters.agree, r.quantization.agree) == (True, True, True, True)
        (group,) = r.quantization.found
        assert (group.kind, group.bits) == ("gptq", 4)
        assert group.elements == sum(prod(s) for n, s in held.items() if "proj" in n)


def test_an_unknown_shape_is_judged_by_its_elements() -> None:
    model, held = golden("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    one = packed(held, shape=False)
    one[name] = replace(one[name], elements=one[name].elements + 2)
    r = look(model, one, quantization="gptq")
    assert [(x.name, x.stored, x.config) for x in r.reshaped] == [(name, None, held[name])]


def test_packed_weights_of_a_transposing_layout_may_be_turned() -> None:
    """GPTQ and MXFP4 tell (out, in); GPT-2 stores (in, out)."""
    model, held = golden("gpt2")
    part = "mlp.c_fc.weight"
    turned = {n: w(n, s[::-1], "U8", container="gptq", bits=4, turned=True) if n.endswith(part) else w(n, s)
              for n, s in held.items()}
    assert look(model, turned, quantization="gptq").agrees
    wrong = {n: w(n, (s[1], s[0] + 1), "U8", container="gptq", bits=4, turned=True) if n.endswith(part) else w(n, s)
             for n, s in held.items()}
    assert len(look(model, wrong, quantization="gptq").reshaped) == model.n_layers
    straight = {n: replace(x, turned=False, container=None) for n, x in turned.items()}
    assert len(look(model, straight).reshaped) == model.n_layers


@pytest.mark.parametrize(("method", "kind", "code"), [
    ("gptq", None, "quantization-absent"), (None, "gptq", "quantization-undeclared"),
    ("awq", "gptq", "quantization-differs"), ("gptq", "gptq", None), (None, None, None), ("unheard-of", "gptq", None),
])
def test_the_container_and_the_config_are_compared(method: str | None, kind: str | None, code: str | None) -> None:
    model, held = golden("llama")
    r = look(model, packed(held, kind) if kind else held, quantization=method)
    assert codes(r) == ({code} if code else set())
    assert r.quantization.agree is (None if method == "unheard-of" else code is None)
    assert r.clean is (code is None)


def test_what_cannot_be_read_is_not_judged() -> None:
    model, held = golden("llama")
    name = "model.layers.0.mlp.up_proj.weight"
    rest = {n: s for n, s in held.items() if n != name}
    r = look(model, rest, unread={name: "why not"}, quantization="gptq")
    assert (r.agrees, r.missing, r.unexpected, r.parameters.files) == (None, (), (), None)
    assert r.not_judged == f"{name}: why not"
    assert codes(r) == {"container-unread"}
    assert not r.clean
    del rest["model.norm.weight"]
    assert look(model, rest, unread={name: "why"}, quantization="gptq").missing == ("model.norm.weight",)


def test_a_quantisation_that_nothing_here_reads_is_not_judged_by_name() -> None:
    model, held = golden("llama")
    other = {n.replace("up_proj.weight", "up_proj.blob"): s for n, s in held.items()}
    r = look(model, other, quantization="new-method")
    assert (r.agrees, r.missing, r.unexpected, r.parameters.files) == (None, (), (), None)
    assert "new-method" in str(r.not_judged)
    assert look(model, other).agrees is False


def test_the_stored_dtype_is_compared() -> None:
    model, held = golden("llama")
    named = replace(model, dtype="bf16")
    r = look(named, held)
    assert (r.dtype_config, r.dtype_stored, codes(r)) == ("bf16", "fp32", {"dtype-differs"})
    few = {n: w(n, s, "BF16" if prod(s) > 20 else "F32") for n, s in held.items()}
    assert look(named, few).notes == ()


def test_a_description_without_names_is_judged_by_its_total() -> None:
    """GGUF: the description accounts for the file block by block, unless a part of it is not here."""
    model, held = golden("llama")
    weights = [w(n, s) for n, s in held.items()] + [w("blk.0.ffn_up.scale", (1,)), w("rope_freqs.weight", (4,))]
    ignored = (("rope_freqs.weight", "computed"), ("*.scale", "scales"))

    def judged(some: list[W]) -> InspectReport:
        found = Inventory(files=(), tensors={x.name: x for x in some}, weights=tuple(some))
        return inspect(found, id="x", model=model, ignored=ignored)

    whole = judged(weights)
    assert (whole.compared, whole.agrees, whole.clean, whole.dtype_config) == ("block", True, True, None)
    assert whole.parameters.files == model.total()
    part = judged(weights[3:])
    assert (part.agrees, part.clean, codes(part)) == (False, False, {"parameters-differ"})


def test_without_a_description_only_the_headers_are_told() -> None:
    _, held = golden("llama")
    r = look(None, held)
    assert (r.family, r.agrees, r.compared, r.head, r.parameters.config) == (None,) * 5
    assert r.clean
    assert r.parameters.files == sum(prod(s) for s in held.values())
    assert r.dtypes[0].weights_bytes == 4 * r.parameters.files
    json.dumps(r.to_dict())
