"""The renderer of one chat template; run as a file by a Python of its own, which nothing else lives in.

It reads one JSON object from stdin and writes one to stdout: {"kind": "text" | "failed" | "extra-missing", "text"}.
Environment, filters and functions are those that transformers gives to templates (utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Answer the request on stdin."""
    request = json.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    _bound(request["cpu"], request["memory"])
    try:
        answer = {"kind": "text", "text": rendered(request["template"], request["variables"], request["limit"])}
    except ImportError as e:
        answer = {"kind": "extra-missing", "text": e.name or "jinja2"}
    except MemoryError:
        answer = {"kind": "failed", "text": f"it takes more than {request['memory'] >> 20:,} MiB of memory"}
    except RecursionError:
        answer = {"kind": "failed", "text": "it is nested too deep, or calls itself without end"}
    except Exception as e:  # a template may raise whatever Python does
        answer = {"kind": "failed", "text": _first_line(e)}
    sys.stdout.buffer.write(json.dumps(answer).encode("ascii"))


def _first_line(e: Exception) -> str:
    said = (str(e).strip().splitlines() or [""])[0][:300]
    line = getattr(e, "lineno", None)
    name = "" if type(e).__name__ == "TemplateError" else f"{type(e).__name__}: "
    return f"{name}{said}" + (f" (line {line:,})" if isinstance(line, int) else "")


def _bound(cpu: int, memory: int) -> None:
    """Limits of this process; where the system has none, the caller's clock alone stops it."""
    try:
        import resource
    except ImportError:
        return
    for what, most in ((resource.RLIMIT_CPU, cpu), (resource.RLIMIT_AS, memory)):
        try:
            resource.setrlimit(what, (most, most))
        except (OSError, ValueError):
            continue


def rendered(template: str, variables: dict[str, Any], limit: int) -> str:
    """The text of `template`, at most `limit` characters; it is made piece by piece, so that a loop cannot go on."""
    out, size = [], 0
    for part in environment().from_string(template).generate(**variables):
        size += len(part)
        if size > limit:
            raise ValueError(f"it writes more than {limit:,} characters")
        out.append(part)
    return "".join(out)


def environment() -> Any:
    """The sandbox for templates: no attribute of Python's own machinery, nothing that changes what it was given."""
    import jinja2
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks what the assistant wrote; here it is written like the rest."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("_plain"), [], [], body).set_lineno(line)

        def _plain(self, caller: Callable[[], str]) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """namespace(...), without names that begin with an underscore."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            values = dict(*args[1:], **kwargs)
            for name in values:
                _plain_name(name)
            jinja2.utils.Namespace.__init__(args[0], values)

        def __setitem__(self, name: str, value: Any) -> None:
            _plain_name(name)
            super().__setitem__(name, value)

    def _plain_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")

    def fail(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    env.globals.update(raise_exception=fail, strftime_now=_now, dict=_Dict(), namespace=Namespace)
    return env


def _tojson(
    x: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; jinja's own filter writes it for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(format)


class _Dict:
    """dict(...) for templates, and nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """dict.fromkeys."""
        return dict.fromkeys(*args)


if __name__ == "__main__":
    main()
