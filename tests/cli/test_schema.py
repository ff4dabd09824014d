"""Every --json answer follows `llamactl schema COMMAND`, and the schemas follow their committed copies.

After a deliberate change: LLAMACTL_WRITE_SCHEMAS=1 python -m pytest tests/cli/test_schema.py
Inside one schema number keys are only ever added, so a key that is gone from a copy means a new number.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from llamactl.cli.app import COMMANDS as EVERY

COPIES = Path(__file__).parent / "schemas"
COMMANDS = tuple(c for c in EVERY if c != "schema")
ANSWERS: dict[str, list[str]] = {
    "params": ["llama-3-8b", "mixtral-8x7b gpt2 --by layer", "deepseek-v3 --dtype q4_0", "gemma-3-4b --set kv_heads=1",
               "falcon-40b --tree", "transformer-base -v"],
    "kv-cache": ["llama-3-8b", "gemma-2-9b --sweep ctx=1k..8k,batch=1,8,dtype=bf16,q8_0", "deepseek-v3 --expanded",
                 "llama-4-scout --ctx 1m --engine vllm --tp 4", "gpt2 llama-3-8b --ctx 2048 --engine llama.cpp",
                 "falcon-40b --ctx 8 --engine hf --k-dtype fp32"],
    "flops": ["llama-3-8b --ctx 8192", "mixtral-8x7b gpt2 --phase decode --ctx 512"],
    "fit": ["llama-3-8b --gpu h100-80gb", "mixtral-8x7b --gpu l4-24gbx8 --ctx 4096 --batch 4"],
    "compare": ["gpt2 llama-3-8b", "llama-3-8b mistral-7b-v0.1 gemma-2-9b", "gpt2 gpt2"],
    "evolve": ["gpt2 llama-3-8b"],
    "rope": ["llama-3-8b", "llama-3.1-8b", "gpt2 gemma-3-4b", "llama-3-8b --target-ctx 32k --method yarn"],
    "presets": ["", "list", "show llama-3-8b", "show deepseek-v3"],
    "lab": ["", "list", "run swiglu", "run gqa rope-identity --seed 3"],
    "doctor": [""],
    "version": [""],
}


@pytest.fixture
def validator(cli: Any) -> Any:
    def of(command: str) -> Draft202012Validator:
        schema = cli("schema", command).json()
        Draft202012Validator.check_schema(schema)
        return Draft202012Validator(schema)

    return of


@pytest.mark.parametrize(("command", "args"), [(c, a) for c, lines in ANSWERS.items() for a in lines])
def test_an_answer_follows_its_schema(cli: Any, validator: Any, command: str, args: str) -> None:
    got = cli(command, *args.split(), "--json")
    body = got.json()
    validator(command).validate(body)
    assert got.code in (0, 1)
    assert (body["schema"], body["command"]) == (1, command)


def test_an_answer_with_files_and_warnings_follows_its_schema(cli: Any, validator: Any, folder: Any, tiny: Any) -> None:
    tensors = {**tiny.tensors(tiny.config), "extra": ("F16", (3,))}
    body = cli("params", folder({**tiny.config, "hidden_size": 64.0}, tensors=tensors), "--weights", "--json").json()
    validator("params").validate(body)
    assert len(body["warnings"]) == 2
    assert body["result"]["models"][0]["files"]["agrees"] is False
    assert body["model"]["source"] == "local"
    validator("kv-cache").validate(cli("kv-cache", folder(), "--ctx", "1m", "--json").json())


@pytest.mark.parametrize("args", ["-p A", "-p A --logprobs --greedy --stop c", "-p A -n 0", "-p A -n 1", "--tokens 65",
                                  "-p A --temperature 2 --ignore-end -n 2000000 --stop c"])
def test_a_generated_text_follows_its_schema(cli: Any, validator: Any, speaker: Any, tmp_path: Path, args: str) -> None:
    path = speaker.write(tmp_path / "speaker", speaker.chain("Abc"), words="--tokens" not in args)
    got = cli("generate", path, *args.split(), "--json")
    validator("generate").validate(got.json())
    assert (got.model["text"] is None) is ("--tokens" in args)  # without a tokenizer there is none


def objects(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all objects inside a JSON value."""
    if isinstance(value, dict):
        yield path
    for key, child in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from objects(child, (*path, key))


# Objects whose keys are data, not names: what was asked for, dtypes, a maker's figures, a config file, libraries, the
# parts and features that a model has, a scheme's parameters.
OPEN = {"inputs", "options", "weights_at", "bytes_by_dtype", "published", "config", "libraries", "parts", "features",
        "parameters"}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_object_takes_a_key_more_or_a_key_less(cli: Any, validator: Any, folder: Any, tiny: Any, speaker: Any,
                                                  tmp_path: Path, command: str) -> None:
    args = {"generate": (speaker.write(tmp_path / "speaker", speaker.chain("Abc")), "-p", "A", "--logprobs"),
            "bench": (speaker.write(tmp_path / "timed", speaker.chain("Abc")), "--prompt-tokens", "4", "--decode-after",
                      "3", "--new", "2", "--batch", "1", "--repeat", "1"),
            "ablate": (speaker.write(tmp_path / "edited", speaker.chain("Abc")), "--tokens", "8", "--edits", "gelu"),
            "lab": ("run", "blocks", "swiglu", "--steps", "1"),
            "verify": (speaker.write(tmp_path / "port", speaker.chain("Abc")), "--reference",
                       speaker.write(tmp_path / "source", speaker.chain("Acb")), "--tokens", "65,66,67,68",
                       "--no-explain"),
            "params": ("mixtral-8x7b", folder(tensors={**tiny.tensors(tiny.config), "x": ("F32", (1,))}), "--weights"),
            "kv-cache": ("gemma-2-9b", "--ctx", "16k"),
            "reference": (folder(name="asked", tensors=tiny.tensors(tiny.config)), "-o", tmp_path / "r.safetensors",
                          "--layers"),
            "convert": (folder(name="sound", tensors={**tiny.tensors(tiny.config), "a.rotary_emb.inv_freq": (
                        "F32", (4,))}), tmp_path / "converted"),
            "diff": (folder(name="one", tensors=tiny.tensors(tiny.config)),
                     folder(name="other", tensors=tiny.tensors(tiny.config, "BF16")), "--all"),
            "inspect": (folder(tensors={**tiny.tensors(tiny.config), "x": ("F32", (1,))}),),
            "presets": ("show", "llama-3-8b"), "version": (), "doctor": (), "flops": ("mixtral-8x7b", "--ctx", "8192"),
            "fit": ("llama-3-8b", "--gpu", "h100-80gb"), "compare": ("gpt2", "llama-3-8b"),
            "evolve": ("gpt2", "llama-3-8b"), "rope": ("llama-3.1-8b",),
            "explore": ("gpt2", "mixtral-8x7b", "-o", tmp_path / "page.html"),
            "check": (Path(__file__).parents[1] / "budgets" / "budget.toml",)}[command]
    if command == "params":
        args = args[1:]
    body = cli(command, *args, "--json").json()
    check = validator(command)
    check.validate(body)
    seen = 0
    for path in objects(body):
        if OPEN & set(path):
            continue
        seen += 1
        for change in ("more", "less"):
            other = copy.deepcopy(body)
            at = other
            for key in path:
                at = at[key]
            if change == "more":
                at["surprise"] = 1
            else:
                required = [k for k in at if k not in ("files", "config")]
                del at[required[0]]
            with pytest.raises(ValidationError):
                check.validate(other)
    assert seen >= 2


@pytest.mark.parametrize(("path", "value"), [
    (("result", "models", 0, "total"), "8030261248"), (("result", "models", 0, "total"), 8.5),
    (("result", "models", 0, "weights_bytes"), "16 GB"), (("result", "models", 0, "active"), 1), (("schema",), 2),
    (("result", "models", 0, "components", "norms"), None), (("command",), "kv-cache"), (("model", "source"), "disk"),
    (("warnings",), ["text"]), (("result", "models", 0, "layer_groups", 0, "ranges"), [[0]]),
])
def test_a_wrong_value_is_caught(cli: Any, validator: Any, path: tuple[Any, ...], value: Any) -> None:
    body = cli("params", "llama-3-8b", "--json").json()
    at = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(ValidationError):
        validator("params").validate(body)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_prints_json_has_a_schema(cli: Any, command: str) -> None:
    assert cli("schema", command).json()["properties"]["command"] == {"const": command}


def test_the_only_format_of_a_schema_may_be_asked_for(cli: Any) -> None:
    assert cli("schema", "params", "--json").out == cli("schema", "params").out


@pytest.mark.parametrize("command", COMMANDS)
def test_schemas_equal_their_committed_copies(cli: Any, command: str) -> None:
    text, file = cli("schema", command).out, COPIES / f"{command}.json"
    if os.environ.get("LLAMACTL_WRITE_SCHEMAS"):
        file.write_text(text, encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8")) == json.loads(text)


def test_no_copy_is_left_over() -> None:
    assert {f.stem for f in COPIES.glob("*.json")} == {*COMMANDS, "error"}


@pytest.mark.parametrize("command", ["params", "kv-cache"])
def test_the_names_of_schema_1_stay(command: str) -> None:
    """The names that users were promised; others may stand beside them."""
    schema = json.loads((COPIES / f"{command}.json").read_text())
    model = schema["properties"]["result"]["properties"]["models"]["items"]
    promised = {
        "params": "id family model_type total text_total tied layers blocks_total components ffn_share_blocks "
                  "ffn_share_model active dtype weights_bytes not_counted",
        "kv-cache": "id family model_type groups elements_per_token_full elements_per_token_windowed state_elements "
                    "k_dtype v_dtype engine weights_bytes full_heads_ratio at bytes_per_token",
    }[command]
    assert set(promised.split()) <= set(model["required"])
    if command == "kv-cache":
        at, group = (model["properties"][k]["items"]["properties"] for k in ("at", "groups"))
        assert {"ctx", "batch", "kv_cache_bytes", "state_bytes", "full_heads_bytes"} <= set(at)
        assert {"kind", "layers", "window", "elements_per_token"} <= set(group)
        return
    parts = model["properties"]["components"]["properties"]
    assert set(parts) >= {"token_embedding", "position_embedding", "attention", "feed_forward", "norms", "state_space",
                          "lm_head", "vision", "projector", "other"}
    assert set(parts["attention"]["properties"]) == {"q", "k", "v", "o", "other", "total"}
    assert set(parts["feed_forward"]["properties"]) == {"gate", "up", "down", "router", "routed_experts",
                                                        "shared_experts", "total"}


def test_the_names_of_verify_stay() -> None:
    result = json.loads((COPIES / "verify.json").read_text())["properties"]["result"]["anyOf"][0]
    assert {"verdict", "explanations", "first_difference", "measures", "floor", "inventory"} <= set(result["required"])
    explanation = result["properties"]["explanations"]["items"]
    assert {"edit", "scope", "residual", "equivalent"} <= set(explanation["required"])
    measures = result["properties"]["measures"]["anyOf"][0]
    assert {"max_kl", "mean_kl", "max_abs_dlogit", "top1_agreement", "kl_position_0", "kl_by_quarter"} <= set(
        measures["required"])
