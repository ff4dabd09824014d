"""A GGUF model in several files, as gguf-split writes them: NAME-00001-of-00003.gguf, metadata in the first."""

from __future__ import annotations

import os
import re
from dataclasses import replace

from llamactl.checkpoint.gguf import MAX_TENSORS, GgufHeader, GgufTensor, read_header
from llamactl.checkpoint.ggufcursor import refused
from llamactl.checkpoint.safetensors import quote


def read_parts(path: str) -> GgufHeader:
    """The header of the model that the file at `path` belongs to: the first part's metadata, the tensors of all parts.

    Offsets of the tensors count in their own files. With parts missing, the header of this file alone; the tensors are
    then fewer than split.tensors.count. Errors: those of read_header; gguf-header where the parts do not fit together.
    """
    return joined(all_parts(path))


def all_parts(path: str) -> list[GgufHeader]:
    """The headers of all parts of the model that the file at `path` belongs to, in order; else its own alone."""
    header = read_header(path)
    count = header.metadata.get("split.count", 1)
    folder, base = os.path.split(path)
    named = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", base, re.S)
    if not isinstance(count, int) or count < 2 or named is None or int(named[2]) != count:
        return [header]
    names = [f"{named[1]}-{n + 1:05d}-of-{count:05d}.gguf" for n in range(count)]
    there = set(os.listdir(folder or "."))
    if not there.issuperset(names):
        return [header]
    return [header if name == base else read_header(os.path.join(folder, name)) for name in names]


def joined(parts: list[GgufHeader]) -> GgufHeader:
    """The parts of one model as one header."""
    count = len(parts)
    if count == 1:
        return parts[0]
    tensors: dict[str, GgufTensor] = {}
    for n, part in enumerate(parts):
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (n, count):
            raise refused(part.path, f"split.no and split.count do not say that it is part {n + 1} of {count}")
        for t in part.tensors:
            if t.name in tensors:
                raise refused(part.path, f"tensor {quote(t.name)} stands in an earlier part too")
            tensors[t.name] = t
        if len(tensors) > MAX_TENSORS:
            raise refused(part.path, f"more than {MAX_TENSORS:,} tensors in all parts together")
    return replace(parts[0], tensors=tuple(tensors.values()), file_bytes=sum(p.file_bytes for p in parts),
                   notes=tuple(dict.fromkeys(note for p in parts for note in p.notes)))
