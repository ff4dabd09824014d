"""Strict JSON: what is refused, with which code, and that nothing but a LlamactlError ever comes out."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamactl.errors import InputRefused, LlamactlError, NotAvailable
from llamactl.spec import jsontext
from llamactl.spec.jsontext import MAX_DEPTH, parse_json, read_bytes, read_json


def refusal(data: bytes) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        parse_json(data, "dir/config.json")
    assert caught.value.path == "dir/config.json"
    assert caught.value.line().isprintable()
    return caught.value


@pytest.mark.parametrize(("data", "code", "words"), [
    (b"", "json-empty", "empty file"),
    (b" \n\t", "json-empty", "empty file"),
    (b'{"hidden_size": 16,}\n', "json-syntax", "line 1, column 20"),
    (b'{\n "a": 1\n "b": 2}', "json-syntax", "line 3, column 2"),
    (b'{"a": 1}garbage', "json-syntax", "line 1, column 9"),
    (b'{"a": 16 /* x */}', "json-syntax", "line 1"),
    (b'{"a": 1_6}', "json-syntax", "line 1"),
    (b"{'a': 1}", "json-syntax", "line 1"),
    (b'{"a": 01}', "json-syntax", "line 1"),
    (b'{"a": "\x01"}', "json-syntax", "line 1"),
    (b'{"a": nul}', "json-syntax", "line 1"),
    (b'{"a"', "json-syntax", "line 1"),
    (b"\xef\xbb\xbf", "json-syntax", "line 1"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n", "lfs-pointer", "Git LFS pointer"),
    ('{"a": "\xe9"}'.encode("latin-1"), "json-encoding", "not UTF-8 (byte 7)"),
    (json.dumps({"a": 1}).encode("utf-16"), "json-encoding", "not UTF-8 (byte 0)"),
    (json.dumps({"a": 1}).encode("utf-16-le"), "json-syntax", "line 1"),
    (b'{"a": 1, "b": 2, "a": 3}', "json-duplicate", "'a' stands twice"),
    (b'{"x": {"a": 1, "a": 1}}', "json-duplicate", "'a' stands twice"),
    (b'[{"\\u0061": 1, "a": 1}]', "json-duplicate", "'a' stands twice"),
    (b'{"a": NaN}', "config-type", "not finite"),
    (b'{"a": Infinity}', "config-type", "not finite"),
    (b'{"a": -Infinity}', "config-type", "not finite"),
    (b'{"a": 1e999}', "config-range", "beyond the range of a 64-bit float"),
    (b'{"a": -1e999}', "config-range", "beyond the range of a 64-bit float"),
    (b'{"a": ' + b"9" * 5000 + b"}", "config-range", "an integer of 5000 digits"),
    (b'{"a": -' + b"9" * 21 + b"}", "config-range", "digits"),
    (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json-depth", "deeper than 64 levels"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "json-depth", "deeper than 64 levels"),
    (b"[" * 100_000, "json-depth", "deeper than 64 levels"),
    (b"[" + b"1," * 4_000_001 + b"1]", "json-too-large", "more than 4,000,000 values"),
])
def test_refused(data: bytes, code: str, words: str) -> None:
    error = refusal(data)
    assert error.code == code
    assert words in error.message


@pytest.mark.parametrize(("data", "value"), [
    (b'\xef\xbb\xbf{"a": 1}', {"a": 1}),
    (b'{"a": 1,\r\n "b": [2]}\r\n', {"a": 1, "b": [2]}),
    (b' {"a": 1} ', {"a": 1}),
    ('{"a": "\u6a21\u578b \xfcn\xef \U0001f999"}'.encode(), {"a": "\u6a21\u578b \xfcn\xef \U0001f999"}),
    (b'{"a": "\\ud800"}', {"a": "\ud800"}),
    (b'{"a": 99999999999999999999}', {"a": 99999999999999999999}),
    (b'{"a": 1e-400}', {"a": 0.0}),
    (b'{"": 1, " ": 2}', {"": 1, " ": 2}),
    (b"null", None), (b"[]", []), (b"16.0", 16.0), (b'"x"', "x"), (b"true", True),
])
def test_accepted(data: bytes, value: Any) -> None:
    assert parse_json(data, "config.json") == value


def test_integers_stay_integers_and_minus_zero_is_a_float() -> None:
    assert isinstance(parse_json(b"16", "x"), int)
    assert isinstance(parse_json(b"16.0", "x"), float)
    assert isinstance(parse_json(b"-0", "x"), float)  # as other readers have it, so that no integer is negative zero


def test_depth_is_cut_where_it_says() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    parse_json(nested(MAX_DEPTH), "x")
    assert refusal(nested(MAX_DEPTH + 1)).code == "json-depth"
    mixed = b'{"a":[' * 32 + b"]}" * 32
    parse_json(mixed, "x")
    assert refusal(b"[" + mixed + b"]").code == "json-depth"


def test_control_characters_of_a_key_do_not_reach_the_message() -> None:
    line = refusal(b'{"\\u001b[2J": 1, "\\u001b[2J": 2}').line()
    assert "\x1b" not in line
    assert "\\x1b" in line


# --- files


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable) as caught:
        read_json(str(tmp_path / "config.json"))
    assert (caught.value.code, caught.value.exit_code) == ("not-found", 4)


def test_dangling_link_names_its_target(tmp_path: Path) -> None:
    link = tmp_path / "config.json"
    link.symlink_to("../blobs/gone")
    with pytest.raises(InputRefused) as caught:
        read_json(str(link))
    assert caught.value.code == "dangling-link"
    assert "../blobs/gone" in caught.value.message


def test_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b'{"a": 1}')
    (tmp_path / "config.json").symlink_to("blob")
    assert read_json(str(tmp_path / "config.json")) == {"a": 1}


def test_link_loop(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(InputRefused) as caught:
        read_json(str(tmp_path / "config.json"))
    assert caught.value.code == "io-error"


@pytest.mark.parametrize("make", ["fifo", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, make: str) -> None:
    """A FIFO without a writer would block an open for ever."""
    path = tmp_path / "config.json"
    if make == "fifo":
        os.mkfifo(path)
    elif make == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(InputRefused) as caught:
        read_json(str(path))
    assert caught.value.code == "not-a-file"


def test_huge_sparse_file_is_refused_by_its_size(tmp_path: Path, within: Any) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as f:
        f.truncate(1 << 40)
    with within(20), pytest.raises(InputRefused) as caught:
        read_json(str(path))
    assert caught.value.code == "json-too-large"
    assert "1,099,511,627,776 bytes" in caught.value.message


def test_a_file_that_grows_after_stat_is_still_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * 100)
    monkeypatch.setattr(jsontext.os, "stat", lambda _: SimpleNamespace(st_mode=stat.S_IFREG, st_size=1))
    with pytest.raises(InputRefused, match="more than 50 bytes") as caught:
        read_bytes(str(path), limit=50)
    assert caught.value.code == "json-too-large"


def test_odd_paths(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"{}")
    for path in ("a\0b", str(tmp_path / "file" / "config.json"), str(tmp_path / ("x" * 300))):
        with pytest.raises(LlamactlError) as caught:
            read_json(path)
        assert caught.value.exit_code in (3, 4)
        assert "\0" not in caught.value.line()


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a patched open: root may read everything."""
    path = tmp_path / "config.json"
    path.write_bytes(b"{}")

    def denied(*_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", denied)
    with pytest.raises(InputRefused, match="cannot be read: Permission denied") as caught:
        read_bytes(str(path))
    assert caught.value.code == "io-permission"


# --- properties


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_value_or_a_refusal(data: bytes) -> None:
    refused: LlamactlError | None = None
    try:
        parse_json(data, "x")
    except LlamactlError as e:
        refused = e
    assert refused is None or (refused.exit_code == 3 and refused.line().isprintable())


@settings(deadline=None, max_examples=300)
@given(st.text(alphabet='{}[]",:0123456789.eE+-truefalsn \n\\u\ufeff\xe9', max_size=60))
def test_anything_like_json_gives_what_the_standard_reader_gives_or_a_refusal(text: str) -> None:
    try:
        ours = parse_json(text.encode(), "x")
    except LlamactlError:
        return
    assert ours == json.loads(text.removeprefix("\ufeff"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**18), 10**18) | st.text(max_size=10)
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@settings(deadline=None, max_examples=300)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_what_json_writes_is_read_back_the_same(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    back = parse_json(text.encode("utf-8"), "x")
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize("digits", ["1000000000000000019884624838656", "-" + "9" * 21, "9" * 300])
def test_a_long_integer_is_a_float_where_every_value_is_checked(digits: str) -> None:
    data = b'{"model_max_length": ' + digits.encode() + b"}"
    assert parse_json(data, "tokenizer_config.json", finite=False) == {"model_max_length": float(digits)}
    assert refusal(data).code == "config-range"


def test_an_integer_beyond_a_float_is_refused_everywhere() -> None:
    with pytest.raises(InputRefused, match="an integer of 301 digits"):
        parse_json(b"[" + b"9" * 301 + b"]", "x.json", finite=False)
