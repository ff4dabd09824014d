"""Reading model.safetensors.index.json: which shard holds which tensor. The names in it are untrusted paths."""

from __future__ import annotations

import os
from dataclasses import dataclass

from llamactl.checkpoint.disk import check_regular
from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused
from llamactl.spec.jsontext import read_json

INDEX = "model.safetensors.index.json"
MAX_SHARDS = 10_000  # the largest models have a few hundred


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """weight_map: tensor name -> shard, a relative path inside the folder. total_size: bytes as the file says them."""

    weight_map: dict[str, str]
    total_size: object = None
    warnings: tuple[tuple[str, str], ...] = ()

    @property
    def shards(self) -> tuple[str, ...]:
        """The distinct shards, sorted."""
        return tuple(sorted(set(self.weight_map.values())))


def read_index(folder: str) -> Index:
    """Read and check the index of `folder`; no shard is looked at.

    Errors (InputRefused): index-schema, index-path for a name that is not a plain relative *.safetensors path inside
    the folder, and the codes of jsontext and disk.
    """
    path = os.path.join(folder, INDEX)
    check_regular(path, inside=folder)
    root = read_json(path)
    if not isinstance(root, dict):
        raise _schema("must be a JSON object", path)
    weight_map = root.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what = "no weight_map" if "weight_map" not in root else "weight_map must be an object that is not empty"
        raise _schema(f"{what}: which file holds which tensor is unknown", path)
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise _schema(f"weight_map {quote(name)} must name a file", path)
    shards = set(weight_map.values())
    if len(shards) > MAX_SHARDS:
        raise _schema(f"weight_map names {len(shards):,} files; at most {MAX_SHARDS:,} are read", path)
    for shard in sorted(shards):
        why = _not_inside(shard)
        if why:
            raise InputRefused("index-path", f"weight_map names {quote(shard)}: {why}", path=path,
                               help="shards are *.safetensors files inside the model folder")
    metadata = root.get("metadata")
    if metadata is None:
        missing = ("index-no-metadata", "no metadata in the index; some loaders refuse it")
        return Index(weight_map=weight_map, warnings=(missing,))
    if not isinstance(metadata, dict):
        raise _schema("metadata must be an object", path)
    return Index(weight_map=weight_map, total_size=metadata.get("total_size"))


def _not_inside(shard: str) -> str | None:
    """Why `shard` is no plain relative path below the folder, on any system; None if it is one."""
    if "\0" in shard:
        return "a NUL character"
    if "\\" in shard or ":" in shard:
        return "a Windows path"
    if shard.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in shard.split("/")):
        return "a path that leaves the folder or is not plain"
    if not shard.endswith(".safetensors"):
        return "not a .safetensors file"
    try:
        os.fsencode(shard)
    except UnicodeEncodeError:
        return "not a file name"
    return None


def _schema(message: str, path: str) -> InputRefused:
    return InputRefused("index-schema", message, path=path, help="download the index again")
