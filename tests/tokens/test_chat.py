"""Chat templates: the text transformers makes, and no template that can do harm or run on."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from llamactl.errors import InputRefused, NotAvailable, UsageError
from llamactl.tokens import chat, open_tokenizer
from llamactl.tokens.chat import template_of, written

MODULE = sys.modules["llamactl.tokens.chat"]  # the room's name for it is the function
CHATML = (
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{{- "<|turn|>system\\n\\n" + system_message + "<|end|>" }}
{%- for message in messages %}
    {%- if loop.index > 40 %}{%- break %}{%- endif %}
    {{- '<|turn|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<|turn|>' + role + '\n' + message['content'] | trim + '<|end|>\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<|turn|>model\n'}}{% endif %}"""
LATEST = """
    {% if true %}
    {{ messages[-1].name is defined }}
    {% endif %}
{% set ns = namespace(found=false, n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if m.role == 'user' %}
{% set ns.found = true %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}
{{ dict(a=ns.n, b='<é>') | tojson }} {{ ns.found }} {{ eos_token }}|{{ pad_token }}|{{ strftime_now('%Y') | length }}"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "gemma": GEMMA, "latest": LATEST}
CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello ü 🤖"}],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " Yes? "}, {"role": "user", "content": "<&>"}],
    [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": "Hi", "name": None}],
)
NAMES = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_chats_are_written_as_transformers_does(
    small: ModuleType, tmp_path: Path, name: str, messages: list[dict[str, Any]], prompt: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    path = small.folder(
        tmp_path,
        small.byte_bpe(),
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **NAMES, "chat_template": TEMPLATES[name]},
    )
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    if name == "gemma" and messages[0]["role"] == "system":
        with pytest.raises(InputRefused, match="the chat template fails: System role not supported"):
            chat(path, open_tokenizer(path), messages)
        return
    wanted = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
    assert chat(path, open_tokenizer(path), messages, add_generation_prompt=prompt) == wanted
    assert wanted


def test_where_a_template_stands(small: ModuleType, tmp_path: Path) -> None:
    path = small.folder(tmp_path, small.byte_bpe())
    with pytest.raises(NotAvailable, match="no chat template") as caught:
        template_of(path)
    assert caught.value.code == "chat-template-missing"
    small.folder(tmp_path, chat_template={"chat_template": "from json"})
    assert template_of(path)[1] == "from json"
    small.folder(
        tmp_path,
        tokenizer_config={
            "chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "from the list"}]
        },
    )
    assert template_of(path)[1] == "from the list"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xef\xbb\xbffrom jinja")
    assert template_of(path) == (str(tmp_path / "chat_template.jinja"), "from jinja")


@pytest.mark.parametrize("value", [7, [{"name": "tool_use", "template": "t"}], {"default": 3}, []])
def test_a_template_that_is_none_is_refused(small: ModuleType, tmp_path: Path, value: object) -> None:
    with pytest.raises(InputRefused) as caught:
        template_of(small.folder(tmp_path, tokenizer_config={"chat_template": value}))
    assert caught.value.code in ("chat-template", "config-type")


def test_a_huge_template_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"a" * 1_000_001)
    with pytest.raises(InputRefused, match="at most 1,000,000"):
        template_of(str(tmp_path))


def render(template: str) -> str:
    return written("t.jinja", template, [{"role": "user", "content": "hi"}], names={}, add_generation_prompt=True)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% for x in range(10**9) %}{% endfor %}",
        "{{ no_such() }}",
        "{% if %}",
        "{{ messages[0] | no_such_filter }}",
        "{{ (",
        "{% generation %}",
        "{{ '%c' % 'ab' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_what_a_template_may_not_do_is_one_line(template: str) -> None:
    with pytest.raises(InputRefused) as caught:
        render(template)
    assert caught.value.code == "chat-template"
    assert "\n" not in caught.value.line()
    assert caught.value.help


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__ }}", "{{ raise_exception.__globals__ }}", "{{ dict.__init__ }}", "{{ messages.__class__ }}"],
)
def test_what_a_sandbox_does_not_give_away_is_nothing(template: str) -> None:
    assert render(template) == ""


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(s='a' * 1000) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'a' * 9999999999 }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x'.ljust(9999999999) }}",
        "{% for a in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
    ],
)
def test_time_memory_and_output_are_bounded(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "CPU_SECONDS", 1)
    begin = time.process_time()
    with pytest.raises(
        InputRefused, match="of computing|MiB|writes more than 4,000,000|Overflow|MemoryError"
    ) as caught:
        render(template)
    assert caught.value.code == "chat-template"
    assert time.process_time() - begin < 5, "it ran in this process"


def test_a_clock_stops_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "WALL_SECONDS", 0.2)
    with pytest.raises(InputRefused, match=r"was stopped: it takes more than 0.2 s"):
        render("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


def test_messages_that_are_none(small: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one message"):
        written("t", CHATML, [], names={}, add_generation_prompt=True)
    with pytest.raises(UsageError, match="no plain data"):
        written("t", CHATML, [{"role": "user", "content": object()}], names={}, add_generation_prompt=True)


def test_special_tokens_are_not_added_again(small: ModuleType, tmp_path: Path) -> None:
    path = small.folder(
        tmp_path, small.byte_bpe(), tokenizer_config={**NAMES, "add_bos_token": True, "chat_template": LLAMA3}
    )
    tokenizer = open_tokenizer(path)
    ids = chat(path, tokenizer, CHATS[0])
    assert ids.count(0) == 1
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|begin|><|turn|>system\n\n<|end|><|turn|>user\n\nHello ü 🤖<|end|><|turn|>assistant\n\n"
    )


def test_no_jinja_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError('gone', name='jinja2')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(NotAvailable, match="the package jinja2 is not installed") as caught:
        render("x")
    assert caught.value.help == "pip install 'llamactl[generate]'"


def test_the_template_sees_no_environment_of_ours(tmp_path: Path) -> None:
    assert render("{{ self }}{{ os }}{{ request }}").startswith("<")
    assert json.dumps(render("{{ messages | tojson }}")) == json.dumps('[{"role": "user", "content": "hi"}]')
