"""Where a model comes from: a folder, a file, a bundled preset or a Hub id. Nothing is described or counted here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.source import presets
from llamactl.spec.jsontext import read_json

EXAMPLE = "llamactl params meta-llama/Meta-Llama-3-8B"
_HUB_ID = r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9_][\w.-]*(?:@[\w./-]+)?"  # not compiled: a preset needs none


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A model reference made definite. source: hub | local | preset | gguf.

    config: the parsed config in Hugging Face's words, or Meta's params.json (form "meta"); None for a GGUF file, whose
    metadata says it. path: the file or folder. note: something the reader should know (e.g. an offline copy was used).
    """

    source: str
    id: str
    path: str | None = None
    revision: str | None = None
    form: str = "hf"
    config: Any = None
    folder: str | None = None
    notes: tuple[tuple[str, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The `model` object of the JSON output."""
        return {"source": self.source, "id": self.id, "revision": self.revision, "path": self.path}


def resolve(ref: str | None, *, offline: bool = False, hub: bool = False) -> Resolved:
    """Find the model that `ref` names: path, `preset:NAME`, preset name, Hub id `ORG/NAME[@REV]` or `hf://...`.

    hub: ask the Hub even where a preset of that id is bundled. offline: never open a socket.
    Raises UsageError (no reference), NotAvailable (not found, offline, gated), InputRefused (malformed files).
    """
    if ref is None or not ref.strip():
        if os.path.isfile("config.json"):
            return _folder(".")
        raise UsageError("no-model", "no MODEL given, and this folder has no config.json", help=f"try: {EXAMPLE}")
    if ref.startswith("preset:"):
        return _preset(presets.find(ref.removeprefix("preset:")), ref.removeprefix("preset:"))
    if ref.startswith("hf://"):
        return _hub(ref.removeprefix("hf://").removeprefix("models/"), offline=offline)
    path = os.path.expanduser(ref)
    if is_path(ref):
        return _local(path, ref)
    if os.path.lexists(path) and ("/" in ref or os.path.isfile(path) or _holds_model(path)):
        return _local(path, ref)
    if not hub and "@" not in ref:
        found = presets.find(ref)
        if found is not None:
            return _preset(found, ref)
        if os.path.lexists(path):  # a folder without a model: what is wrong with it, not what the Hub says of its name
            return _local(path, ref)
    if not re.fullmatch(_HUB_ID, ref):
        raise _nothing(ref)
    return _hub(ref, offline=offline)


def is_path(ref: str) -> bool:
    """Whether `ref` can only mean a path: it begins like one, or has a separator that no Hub id has."""
    drive = ref[1:2] == ":" and ref[0].isalpha()
    deep = ref.count("/") > 1 and "@" not in ref
    return (drive or deep or "\\" in ref or ref in (".", "..") or ref.startswith(("./", "../", "/", "~"))
            or ref.endswith((".json", ".gguf", ".safetensors")))


def _holds_model(path: str) -> bool:
    if any(os.path.lexists(os.path.join(path, name)) for name in ("config.json", "params.json")):
        return True
    try:
        return any(name.endswith(".gguf") for name in os.listdir(path))
    except OSError:
        return False


def _nothing(ref: str) -> NotAvailable:
    return NotAvailable("not-found", "no such file or folder", path=ref,
                        help="give a folder with a config.json, a .gguf file, a preset or a Hub id ORG/NAME")


def _local(path: str, ref: str) -> Resolved:
    """A folder or file on disk."""
    if not os.path.lexists(path):
        raise _nothing(ref)
    if os.path.isdir(path):
        return _folder(path)
    if path.endswith(".gguf") or _magic(path) == b"GGUF":
        return Resolved(source="gguf", id=os.path.basename(path), path=path, form="gguf")
    if path.endswith((".safetensors", ".bin", ".pth", ".pt")):
        raise InputRefused("config-missing-file", "weights alone do not say the architecture", path=ref,
                           help="give the folder that holds the config.json")
    return _config_file(path)


def _magic(path: str) -> bytes:
    """The first four bytes of a regular file, nothing of anything else."""
    if not os.path.isfile(path):
        return b""
    try:
        with open(path, "rb") as f:
            return f.read(4)
    except OSError:
        return b""


def _config_file(path: str) -> Resolved:
    data = read_json(path, finite=False)
    meta = isinstance(data, dict) and "model_type" not in data and "dim" in data and "n_layers" in data
    return Resolved(source="local", id=_name(path), path=path, form="meta" if meta else "hf", config=data,
                    folder=os.path.dirname(path) or ".")


def _name(path: str) -> str:
    """A short id for a local model: its folder's name."""
    full = os.path.abspath(path)
    if os.path.basename(full) in ("config.json", "params.json"):
        full = os.path.dirname(full)
    return os.path.basename(full) or full


def _folder(path: str) -> Resolved:
    """config.json first, then Meta's params.json, then a single GGUF file."""
    for name in ("config.json", "params.json"):
        file = os.path.join(path, name)
        if os.path.lexists(file):
            return _config_file(file)
    try:
        names = sorted(n for n in os.listdir(path) if not n.startswith("."))
    except OSError as e:
        raise InputRefused("io-error", f"cannot be read: {e.strerror}", path=path) from None
    ggufs = [n for n in names if n.endswith(".gguf")]
    if len(ggufs) == 1:
        return _local(os.path.join(path, ggufs[0]), ggufs[0])
    if ggufs:
        raise InputRefused("gguf-several", f"{len(ggufs)} GGUF files and no config.json", path=path,
                           help=f"name one, e.g. {os.path.join(path, ggufs[0])}")
    if any(n.endswith((".safetensors", ".bin", ".pth")) and not n.startswith("adapter_") for n in names):
        raise InputRefused("config-missing-file", "weights without a config.json", path=path,
                           help="copy the model's config.json beside them")
    if "adapter_config.json" in names:
        raise InputRefused("adapter", "an adapter without its base model", path=path,
                           help="give the base model that adapter_config.json names")
    raise InputRefused("no-model", "no config.json, params.json or .gguf here", path=path,
                       help="give the folder of a model")


def _preset(found: presets.Preset | None, ref: str) -> Resolved:
    if found is None:
        near = presets.near(ref)
        raise NotAvailable("preset-not-found", f"no preset {ref!r}",
                           help=f"did you mean preset:{near}?" if near else "'llamactl presets' lists them")
    return Resolved(source="preset", id=found.name if "/" not in ref else ref, path=None, config=found.config)


def _hub(ref: str, *, offline: bool) -> Resolved:
    """One request for config.json, and none where the cache has it and no network is wanted."""
    from llamactl.source.hub import fetch

    repo, _, revision = ref.partition("@")
    if not re.fullmatch(_HUB_ID, repo):
        raise UsageError("hub-id", f"{ref!r} is not a Hub id", help="a Hub id is ORG/NAME or ORG/NAME@REVISION")
    try:
        file = fetch(repo, revision or None, offline=offline)
    except NotAvailable as e:
        near = presets.near(repo)
        if near and e.code in ("hub-offline", "hub-not-found", "hub-unreachable") and "/" not in repo:
            e.help = f"did you mean preset:{near}? Else give a local folder"
        raise
    notes = (("hub-cached", file.note),) if file.note else ()
    return Resolved(source="hub", id=repo, path=file.path, revision=file.commit or revision or None,
                    config=read_json(file.path, finite=False), notes=notes)
