"""JSON Schemas of the --json outputs, derived from the report dataclasses: the names are written once, there."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any

from llamactl.analysis.ablation import AblateReport
from llamactl.analysis.bench import BenchReport
from llamactl.analysis.budget import CheckReport
from llamactl.analysis.compare import Card, CompareReport, EvolveReport
from llamactl.analysis.conversion import ConvertReport
from llamactl.analysis.diff import DiffReport
from llamactl.analysis.experiment import LabList, LabReport
from llamactl.analysis.explore import PageReport
from llamactl.analysis.fit import FitReport
from llamactl.analysis.flops import FlopsReport
from llamactl.analysis.generation import GenerateReport
from llamactl.analysis.inspect import InspectReport
from llamactl.analysis.kvcache import KvCacheReport
from llamactl.analysis.params import ATTENTION, FEED_FORWARD, ParamsReport
from llamactl.analysis.recording import RecordingReport
from llamactl.analysis.rope import RopeReport
from llamactl.analysis.selftest import SelftestReport
from llamactl.analysis.verification import VerifyReport

INTEGER: dict[str, Any] = {"type": "integer"}
STRING: dict[str, Any] = {"type": "string"}
SOURCE = {
    "type": "object",
    "properties": {"source": {"enum": ["hub", "local", "preset", "gguf"]}, "id": STRING,
                   "revision": {"type": ["string", "null"]}, "path": {"type": ["string", "null"]}},
    "required": ["source", "id", "revision", "path"],
    "additionalProperties": False,
}
_COUNTS = dict.fromkeys(("files", "tensors", "elements", "weights_bytes"), INTEGER)
_LISTS = dict.fromkeys(("missing", "unexpected", "reshaped"), {"type": "array", "items": STRING})
FILES = {  # what `params --weights` adds; not required, for without it there is none
    "type": "object",
    "properties": {**_COUNTS, "bytes_by_dtype": {"type": "object", "additionalProperties": INTEGER},
                   "agrees": {"type": ["boolean", "null"]}, **_LISTS},
    "required": [*_COUNTS, "bytes_by_dtype", "agrees", *_LISTS],
    "additionalProperties": False,
}
_LEFT_OUT = {"notes"}  # said as warnings, in the envelope


def of_type(hint: Any) -> dict[str, Any]:
    """The schema of a Python type as `to_dict` and json write it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return of_dataclass(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [of_type(a) for a in args]}
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return {"type": "array", "items": of_type(args[0])}
        return {"type": "array", "prefixItems": [of_type(a) for a in args], "minItems": len(args),
                "maxItems": len(args)}
    if origin is list:
        return {"type": "array", "items": of_type(args[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": of_type(args[1])}
    plain: dict[Any, dict[str, Any]] = {int: INTEGER, str: STRING, bool: {"type": "boolean"},
                                        float: {"type": "number"}, type(None): {"type": "null"}, Any: {}}
    return plain[hint]


def of_dataclass(kind: Any) -> dict[str, Any]:
    """Every field is required and no other key may stand there."""
    hints = typing.get_type_hints(kind)
    fields = {f.name: of_type(hints[f.name]) for f in dataclasses.fields(kind) if f.name not in _LEFT_OUT}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _fixed(keys: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "object", "properties": dict.fromkeys(keys, INTEGER), "required": list(keys),
            "additionalProperties": False}


def _report(kind: Any) -> dict[str, Any]:
    body = of_dataclass(kind)
    body["properties"]["source"] = SOURCE
    body["required"].append("source")
    return body


def _params() -> dict[str, Any]:
    body = _report(ParamsReport)
    parts = body["properties"]["components"]["properties"]
    parts["attention"] = _fixed((*ATTENTION, "total"))
    parts["feed_forward"] = _fixed((*FEED_FORWARD, "total"))
    body["properties"]["not_counted"]["items"] = {
        "type": "object", "properties": {"what": STRING, "params": {"type": ["integer", "null"]}, "why": STRING},
        "required": ["what", "params", "why"], "additionalProperties": False}
    body["properties"]["files"] = FILES
    return _models(body)


def _compare() -> dict[str, Any]:
    body = of_dataclass(CompareReport)
    body["properties"]["models"]["items"] = _report(Card)
    return body


def _diff() -> dict[str, Any]:
    body = of_dataclass(DiffReport)
    for side in body["properties"]["models"]["prefixItems"]:
        side["properties"]["source"] = SOURCE
        side["required"].append("source")
    return body


def _with_models(report: Any) -> dict[str, Any]:
    """A report on several models together, each named with its source before it."""
    body = of_dataclass(report)
    strings = dict.fromkeys(("id", "family", "model_type"), STRING)
    one = {"type": "object", "properties": {**strings, "source": SOURCE}, "required": [*strings, "source"],
           "additionalProperties": False}
    body["properties"] = {"models": {"type": "array", "items": one}, **body["properties"]}
    body["required"].insert(0, "models")
    return body


def _check() -> dict[str, Any]:
    body = of_dataclass(CheckReport)
    one = body["properties"]["models"]["items"]
    one["properties"]["source"] = SOURCE
    one["required"].append("source")
    return body


def _presets() -> dict[str, Any]:
    strings = dict.fromkeys(("id", "family", "model_type", "title"), STRING)
    body = {"type": "object", "properties": {**strings, "hub": {"type": "array", "items": STRING}, "total": INTEGER,
                                             "published": {"type": "object"}, "config": {"type": "object"}},
            "required": [*strings, "hub", "total", "published"], "additionalProperties": False}
    return _models(body)


def _doctor() -> dict[str, Any]:
    check = {"type": "object", "properties": {"check": STRING, "ok": {"type": "boolean"}, "says": STRING},
             "required": ["check", "ok", "says"], "additionalProperties": False}
    return {"type": "object", "properties": {"llamactl": STRING, "checks": {"type": "array", "items": check}},
            "required": ["llamactl", "checks"], "additionalProperties": False}


def _version() -> dict[str, Any]:
    strings = dict.fromkeys(("llamactl", "python", "platform", "executable"), STRING)
    libraries = {"type": "object", "additionalProperties": {"type": ["string", "null"]}}
    return {"type": "object", "properties": {**strings, "libraries": libraries}, "required": [*strings, "libraries"],
            "additionalProperties": False}


def _models(one: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"models": {"type": "array", "items": one}}, "required": ["models"],
            "additionalProperties": False}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "params": _params,
    "kv-cache": lambda: _models(_report(KvCacheReport)),
    "flops": lambda: _models(_report(FlopsReport)),
    "fit": lambda: _models(_report(FitReport)),
    "compare": _compare,
    "evolve": lambda: _with_models(EvolveReport),
    "explore": lambda: _with_models(PageReport),
    "rope": lambda: _models(_report(RopeReport)),
    "check": _check,
    "inspect": lambda: _models(_report(InspectReport)),
    "generate": lambda: _models(_report(GenerateReport)),
    "bench": lambda: _models(_report(BenchReport)),
    "convert": lambda: of_dataclass(ConvertReport),
    "diff": _diff,
    "reference": lambda: _models(_report(RecordingReport)),
    "ablate": lambda: _models(_report(AblateReport)),
    "lab": lambda: {"anyOf": [of_dataclass(LabReport), of_dataclass(LabList)]},
    "verify": lambda: {"anyOf": [of_dataclass(VerifyReport), of_dataclass(SelftestReport)]},
    "presets": _presets,
    "doctor": _doctor,
    "version": _version,
}


def schema_of(command: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of `llamactl COMMAND --json`."""
    warning = {"type": "object", "properties": {"code": STRING, "message": STRING}, "required": ["code", "message"],
               "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"llamactl {command} --json",
        "type": "object",
        "properties": {"schema": {"const": 1}, "command": {"const": command},
                       "model": {"anyOf": [SOURCE, {"type": "null"}]}, "inputs": {"type": "object"},
                       "result": SCHEMAS[command](), "warnings": {"type": "array", "items": warning}},
        "required": ["schema", "command", "model", "inputs", "result", "warnings"],
        "additionalProperties": False,
    }
