"""YAML for untrusted files: plain values only, no duplicate keys, no anchors or tags, and where each value stands."""

from __future__ import annotations

import re
from typing import Any

from llamactl.errors import InputRefused
from llamactl.source.tomlspans import Path, Spans
from llamactl.spec.jsontext import MAX_DEPTH

_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]{0,24})", re.A)  # YAML 1.1 reads 010 as 8 and 1:30 as 90
_FLOAT = re.compile(r"[-+]?[0-9][0-9_]{0,24}\.[0-9_]{0,24}(?:[eE][-+][0-9]{1,3})?", re.A)


def read_yaml(text: str, path: str) -> tuple[Any, Spans]:
    """The one document in `text`, and {path of keys and indices: (start, end)} of its scalars.

    Raises InputRefused with the line. `path` names the file in errors.
    """
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        try:
            return _Reader(loader, yaml, path).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _refuse(path, "budget-syntax", f"not YAML: {where}{e.problem or e.context}") from None
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise _refuse(path, "budget-syntax", f"not YAML: line {line}: {e.reason}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as e:  # the last two: absurd escapes and version numbers
        raise _refuse(path, "budget-syntax", f"not YAML: {e}") from None


def _refuse(path: str, code: str, message: str, help: str | None = None) -> InputRefused:
    return InputRefused(code, message, path=path, help=help)


class _Reader:
    """Builds values from the events themselves: nothing is constructed that was not asked for here."""

    def __init__(self, loader: Any, yaml: Any, path: str) -> None:
        self.loader = loader
        self.yaml = yaml
        self.path = path
        self.spans: Spans = {}

    def document(self) -> tuple[Any, Spans]:
        self.loader.get_event()  # the start of the stream
        if self.loader.check_event(self.yaml.StreamEndEvent):
            return None, {}
        self.loader.get_event()
        value = self._value((), 0)
        self.loader.get_event()
        if not self.loader.check_event(self.yaml.StreamEndEvent):
            raise self._refuse(self.loader.peek_event(), "budget-syntax", "a second document; one is read")
        return value, self.spans

    def _refuse(self, event: Any, code: str, message: str, help: str | None = None) -> InputRefused:
        return _refuse(self.path, code, f"line {event.start_mark.line + 1}: {message}", help)

    def _value(self, at: Path, depth: int) -> Any:
        event = self.loader.get_event()
        if isinstance(event, self.yaml.AliasEvent) or event.anchor is not None:
            raise self._refuse(event, "budget-anchor", "anchors and aliases are not read here", "write the value out")
        if event.tag is not None:
            raise self._refuse(event, "budget-tag", f"the tag {event.tag!r} is not read here", "write a plain value")
        if isinstance(event, self.yaml.ScalarEvent):
            if event.style in (None, "'", '"'):
                self.spans[at] = (event.start_mark.index, event.end_mark.index)
            return self._scalar(event)
        if depth >= MAX_DEPTH:
            raise self._refuse(event, "budget-depth", f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(event, self.yaml.SequenceStartEvent):
            return self._list(at, depth)
        return self._mapping(at, depth)

    def _list(self, at: Path, depth: int) -> list[Any]:
        out: list[Any] = []
        while not self.loader.check_event(self.yaml.SequenceEndEvent):
            out.append(self._value((*at, len(out)), depth + 1))
        self.loader.get_event()
        return out

    def _mapping(self, at: Path, depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while not self.loader.check_event(self.yaml.MappingEndEvent):
            event = self.loader.peek_event()
            if not isinstance(event, self.yaml.ScalarEvent):
                raise self._refuse(event, "budget-key", "a key is not plain text")
            key = self._value((), depth + 1)
            self.spans.pop((), None)
            if not isinstance(key, str):
                raise self._refuse(event, "budget-key", f"the key {key!r} is not text", "quote it")
            if key in out:
                raise self._refuse(event, "budget-duplicate", f"the key {key!r} stands twice in one table")
            out[key] = self._value((*at, key), depth + 1)
        self.loader.get_event()
        return out

    def _scalar(self, event: Any) -> Any:
        tag = self.loader.resolve(self.yaml.ScalarNode, event.value, event.implicit).rpartition(":")[2]
        text = event.value
        if tag in ("str", "value"):
            return text
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() in ("yes", "true", "on")
        if tag == "int" and _INTEGER.fullmatch(text):
            return int(text)
        if tag == "float" and _FLOAT.fullmatch(text):
            return float(text)
        raise self._refuse(event, "budget-value", f"{text[:40]!r} is neither a decimal number, a word, true nor false",
                           "quote it if it is text")
