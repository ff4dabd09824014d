"""A chat as the model's own template writes it, in a process of its own with bounds on time, memory and output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from llamactl.checkpoint.ggufparts import read_parts
from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.tokens import render
from llamactl.tokens.files import MAX_TEMPLATE_BYTES, read_limited, read_object
from llamactl.tokens.tokenizer import Tokenizer, extra_missing

CPU_SECONDS = 5
WALL_SECONDS = 30
MAX_MEMORY = 1 << 30
MAX_RENDERED = 4_000_000  # characters


def chat(
    path: str, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
) -> list[int]:
    """The ids of `messages` ({"role", "content"}) as the template of the model at `path` writes them; the template
    writes BOS itself. add_generation_prompt: with the head of the answer. Errors: NotAvailable chat-template-missing,
    extra-missing; InputRefused chat-template, and those of encode; UsageError chat-messages.
    """
    where, template = template_of(path)
    text = written(where, template, messages, names=tokenizer.names, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(text, special=False)


def template_of(path: str) -> tuple[str, str]:
    """The chat template and the file it stands in: chat_template.jinja, else tokenizer_config.json, else
    chat_template.json; of a GGUF file tokenizer.chat_template. Of several named ones that is "default".
    """
    if not os.path.isdir(path):
        return _checked(path, read_parts(path).metadata.get("tokenizer.chat_template"), "tokenizer.chat_template")
    name = "chat_template.jinja"
    data = read_limited(path, name, MAX_TEMPLATE_BYTES)
    if data is not None:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            where = os.path.join(path, name)
            raise InputRefused("chat-template", f"not UTF-8 (byte {e.start:,})", path=where) from None
        return _checked(os.path.join(path, name), text, name)
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = (read_object(path, name) or {}).get("chat_template")
        if isinstance(value, list):
            named = [t for t in value if isinstance(t, dict) and isinstance(t.get("name"), str)]
            value = {t["name"]: t.get("template") for t in named}
        if isinstance(value, dict):
            if "default" not in value:
                raise InputRefused("chat-template", f"no template named default among {len(value):,}",
                                   path=os.path.join(path, name))
            value = value["default"]
        if value is not None:
            return _checked(os.path.join(path, name), value, "chat_template")
    raise _missing(path)


def _checked(path: str, value: object, key: str) -> tuple[str, str]:
    if value is None:
        raise _missing(path)
    if not isinstance(value, str):
        raise InputRefused("chat-template", f"{key} must be text", path=path)
    if len(value) > MAX_TEMPLATE_BYTES:
        raise InputRefused("chat-template", f"{key} has {len(value):,} characters; at most {MAX_TEMPLATE_BYTES:,}",
                           path=path)
    return path, value


def _missing(path: str) -> NotAvailable:
    return NotAvailable("chat-template-missing", "the model has no chat template", path=path,
                        help="give the prompt as it is, without --chat")


def written(
    path: str, template: str, messages: Sequence[Mapping[str, Any]], *, names: Mapping[str, str],
    add_generation_prompt: bool,
) -> str:
    """The text that `template` makes of `messages`. Errors: see `chat`."""
    if not messages:
        raise UsageError("chat-messages", "a chat needs at least one message", help="give a prompt")
    plain = [{k: v for k, v in m.items() if v is not None} for m in messages]  # templates take a missing key for none
    variables = {**names, "messages": plain, "tools": None, "documents": None,
                 "add_generation_prompt": add_generation_prompt}
    try:
        request = json.dumps({"template": template, "variables": variables, "path": sys.path, "cpu": CPU_SECONDS,
                              "memory": MAX_MEMORY, "limit": MAX_RENDERED}, allow_nan=False)
    except (TypeError, ValueError) as e:
        raise UsageError("chat-messages", f"the messages are no plain data: {e}", help="use strings, lists and numbers"
                         ) from None
    answer = _ask(path, request)
    kind, text = answer.get("kind"), str(answer.get("text", ""))
    if kind == "text":
        return text
    if kind == "extra-missing":
        raise extra_missing(text)
    raise InputRefused("chat-template", f"the chat template fails: {text}", path=path,
                       help="give the prompt as it is, without --chat")


def _ask(path: str, request: str) -> dict[str, Any]:
    """One run of the renderer. Not inside this process: a template may take all time and memory in one operation."""
    def stopped(limit: str) -> InputRefused:
        return InputRefused("chat-template", f"the chat template was stopped: it takes more than {limit}", path=path,
                            help="give the prompt as it is, without --chat")

    command = [sys.executable, "-I", "-S", render.__file__]
    try:
        done = subprocess.run(command, input=request.encode("ascii"), capture_output=True, timeout=WALL_SECONDS,
                              check=False)
    except subprocess.TimeoutExpired:
        raise stopped(f"{WALL_SECONDS:g} s") from None
    except OSError as e:
        raise NotAvailable("chat-template-missing", f"the template cannot be run: {e.strerror or e}", path=path,
                           help="give the prompt as it is, without --chat") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise stopped(f"{CPU_SECONDS} s of computing or {MAX_MEMORY >> 20:,} MiB") from None
    return answer if isinstance(answer, dict) else {}
