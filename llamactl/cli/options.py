"""Options that every reading command has, added once by `@command`, and the values people type."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from llamactl.errors import UsageError

FORMATS = ("table", "plain", "json", "csv", "md")


class Output(NamedTuple):
    """How to answer: format, and how much. color: True, False or None to decide by the stream."""

    format: str
    quiet: bool
    verbose: bool
    color: bool | None


class Access(NamedTuple):
    """How models may be reached. offline: no socket is ever opened. hub: the network wins over a bundled preset."""

    offline: bool
    hub: bool


def complete_model(incomplete: str) -> list[str]:
    """Presets, their Hub ids and models in the local Hub cache; never the network."""
    from llamactl.source import presets
    from llamactl.source.hub import cached_models

    known = (*presets.names(), *presets.hub_ids(), *cached_models())
    return [x for x in dict.fromkeys(known) if x.lower().startswith(incomplete.lower())]


ModelArg = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL...", autocompletion=complete_model, show_default=False,
                   help="Folder, config.json, .gguf file, preset or Hub id. Default: the current folder."),
]
SetOpt = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the model first, e.g. n_kv_heads=1. May be repeated.",
                 show_default=False),
]


def _format(known: tuple[str, ...]) -> Any:
    default = "table on a terminal, else plain" if "table" in known else "plain"
    return Annotated[str | None, typer.Option("--format", metavar="|".join(known), show_default=False,
                                              help=f"Default: {default}.")]


PlotOpt = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE", show_default=False, help="Draw it too, as .png, .svg or .html."),
]
ForceOpt = Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")]
_COMMON: dict[str, tuple[Any, Any]] = {
    "format": (_format(FORMATS), None),
    "json_": (Annotated[bool, typer.Option("--json", help="Same as --format json.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Only the main value, exact.")], False),
    "verbose": (Annotated[bool, typer.Option("--verbose", "-v", help="Say where each number comes from.")], False),
    "color": (Annotated[str, typer.Option("--color", metavar="auto|always|never", help="Colours.")], "auto"),
    "debug": (Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False),
}
_ACCESS: dict[str, tuple[Any, Any]] = {
    "offline": (Annotated[bool, typer.Option("--offline", help="Never open a socket.")], False),
    "hub": (Annotated[bool, typer.Option("--hub", help="Ask the Hub even where a preset is bundled.")], False),
}


def command(app: typer.Typer, *, access: bool = True, formats: tuple[str, ...] = (),
            only: tuple[str, ...] = FORMATS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command with the common options. It gets them as `out: Output` and, with access, `reach: Access`.

    formats: what it can print besides FORMATS. only: those of FORMATS that it can print at all.
    """
    known = (*only, *formats)
    extra = {**_COMMON, "format": (_format(known), None), **(_ACCESS if access else {})}

    def register(function: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(function, eval_str=True)
        own = [p for n, p in signature.parameters.items() if n not in ("out", "reach")]
        added = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d, annotation=a)
                 for n, (a, d) in extra.items()]

        @functools.wraps(function)
        def wrapper(**kwargs: Any) -> None:
            given = {n: kwargs.pop(n) for n in extra}
            if access:
                kwargs["reach"] = Access(offline=given["offline"], hub=given["hub"])
            function(**kwargs, out=_output(given, known))

        wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        app.command()(wrapper)
        return wrapper

    return register


def new_app() -> typer.Typer:
    """A Typer for one command."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False,
                       context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})


def _output(given: dict[str, Any], known: tuple[str, ...]) -> Output:
    wished = os.environ.get("LLAMACTL_FORMAT")  # for all commands: one that has no such format keeps its own
    wished = None if wished in FORMATS and wished not in known else wished
    word = "json" if given["json_"] else given["format"] or wished or (
        "table" if sys.stdout.isatty() and "table" in known else "plain")
    if word not in known:
        raise _choice("--format", word, known)
    if given["color"] not in ("auto", "always", "never"):
        raise _choice("--color", given["color"], ("auto", "always", "never"))
    return Output(format=word, quiet=given["quiet"], verbose=given["verbose"], color=_color(given["color"]))


def _color(word: str) -> bool | None:
    """--color, then NO_COLOR, then CLICOLOR_FORCE / FORCE_COLOR; None leaves it to the terminal."""
    if word != "auto":
        return word == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR") or os.environ.get("CLICOLOR_FORCE", "0") != "0":
        return True
    return None


def _choice(option: str, word: str, known: tuple[str, ...]) -> UsageError:
    from difflib import get_close_matches

    near = get_close_matches(word, known, 1)
    return UsageError("usage", f"{option} {word!r} is not one of {', '.join(known)}",
                      help=f"did you mean {near[0]!r}?" if near else None)


def tokens(text: str, option: str = "--ctx") -> int:
    """A token count: 8192, 8,192, 128k (= 131,072: k is 2^10 tokens, m 2^20)."""
    from llamactl.spec.quantities import tokens as read

    value = read(text)
    if value is None:
        raise UsageError("usage", f"{option} {text!r} is not a number of tokens", help="write 8192, 128k or 1m")
    if not 1 <= value <= 1 << 40:
        raise UsageError("usage", f"{option} {text}: outside 1..2^40")
    return value


def size(text: str, option: str) -> int:
    """Bytes: 80GB (10^9), 74.5GiB (2^30), 512MiB, or a plain integer. A unit is never guessed."""
    if re.fullmatch(r"\d{1,18}", text.strip()):
        return int(text)
    from llamactl.spec import quantities

    found = quantities.size(text)
    if found is None:
        raise UsageError("usage", f"{option} {text!r} is not a size", help="write 80GB, 74.5GiB or a number of bytes")
    return found.floor


def token_list(values: list[str], option: str = "--ctx") -> list[int]:
    """Several counts: repeated options, comma lists, and ranges 1k..128k that double at each step."""
    out: list[int] = []
    for word in (w for v in values for w in _split(v, option)):
        first, dots, last = word.partition("..")
        if not dots:
            out.append(tokens(word, option))
            continue
        a, b = tokens(first, option), tokens(last, option)
        if a > b:
            raise UsageError("usage", f"{option} {word}: the range is empty")
        while a < b:
            out.append(a)
            a *= 2
        out.append(b)
    return list(dict.fromkeys(out))


def _split(text: str, option: str) -> list[str]:
    """A comma list; 131,072 is one number, for no list has 072; and nobody knows what 512,768 is."""
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text.strip()):
        if not re.search(r",0", text):
            apart = " ".join(f"{option} {w}" for w in text.strip().split(","))
            raise UsageError("usage", f"{option} {text.strip()} may be one number or several",
                             help=f"write {option} {text.strip().replace(',', '')} or {apart}")
        return [text]
    return [w for w in re.split(r"[,\s]+", text) if w]


def sweep(text: str) -> dict[str, list[str]]:
    """`ctx=1k..128k,batch=1,8,dtype=bf16,q8_0` as lists; a word without `=` belongs to the key before it."""
    out: dict[str, list[str]] = {}
    key = ""
    for word in _split(text, "--sweep"):
        name, eq, value = word.partition("=")
        if eq:
            key, word = name.strip(), value
            if key not in ("ctx", "batch", "dtype"):
                raise _choice("--sweep", key, ("ctx", "batch", "dtype"))
        if not key:
            raise UsageError("usage", f"--sweep {text!r} names no key", help="write ctx=1k..128k,batch=1,8")
        out.setdefault(key, []).append(word)
    return out
