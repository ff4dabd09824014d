"""`llamactl lab`: options that would do nothing, what trained weights are run on and called, and completion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamactl import lab
from llamactl.cli.labbing import apart, read_on
from llamactl.source import Resolved


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "folder" / "some.txt"
    file.parent.mkdir()
    file.write_text("It was the best of times, it was the worst of times. " * 400)
    return file


@pytest.mark.parametrize("args", [
    ("--model", "x"), ("--text", "x.txt"), ("--bytes",), ("--seed", "1"), ("--steps", "3"), ("--device", "auto"),
    ("--threads", "1"), ("--report", "x.html"), ("--force",),
])
@pytest.mark.parametrize("action", [("list",), ()])
def test_list_takes_no_option_of_run(cli: Any, args: tuple[str, ...], action: tuple[str, ...]) -> None:
    got = cli("lab", *action, *args)
    assert (got.code, got.out) == (2, "")
    assert got.err == f"error[usage]: {args[0]} is for run, and list runs nothing\nhelp: try: llamactl lab run all\n"


@pytest.mark.parametrize(("args", "said"), [
    ("gqa swiglu --steps 3", "--steps is for blocks, which is not asked for"),
    ("gqa --bytes", "--bytes is for checkpoints, and there is none"),
    ("blocks --steps 1 --bytes", "--bytes: no text is run through checkpoints by blocks"),
    ("rope-identity --bytes --model x", "--bytes: no text is run through checkpoints by rope-identity"),
    ("rope-stretch blocks --steps 1 --model x", "--model: no trained weights are read by rope-stretch, blocks"),
    ("rope-stretch --text no.txt", "--text: no text is read by rope-stretch"),
    ("rope-identity --model x --text no.txt", "--text: no text is read by rope-identity"),
    ("gqa --text no.txt", "--text is for blocks and for checkpoints, and there is neither"),
    ("gqa --force", "--force is for --report FILE.html, and there is none"),
])
def test_what_nothing_reads_is_refused_before_the_work(cli: Any, args: str, said: str) -> None:
    got = cli("lab", "run", *args.split())
    assert (got.code, got.out) == (2, "")
    assert got.err.splitlines()[0] == f"error[usage]: {said}"
    assert len(got.err.splitlines()) == 2
    assert cli("lab", "run", *args.split(), "--json").json()["error"]["exit_code"] == 2


def test_who_reads_what(cli: Any) -> None:
    read = {c.name: set(lab.uses(c)) for c in lab.cards()}
    assert read == {"blocks": {"steps", "text"}, "rope-identity": {"checkpoints"}, "rope-stretch": set(),
                    **dict.fromkeys(("gqa", "norm", "shift", "swiglu"), {"checkpoints", "tokens"})}


def test_the_report_says_on_which_text_and_how_many_tokens(cli: Any, folder: Any, tiny: Any, text: Path) -> None:
    said = {**tiny.config, "vocab_size": 256}
    path = folder(said, name="bytes", tensors=tiny.tensors(said))
    args = ("lab", "run", "gqa", "--model", path)

    def told(*more: Any) -> Any:
        return cli(*args, *more, "--json").json()["result"]["text"]

    tokens = f"{tiny.config['max_position_embeddings']:,} tokens of bytes"
    assert told("--bytes") == f"a passage that comes with llamactl: {tokens}"
    assert told("--bytes", "--text", text) == f"some.txt: {tokens}"  # not the path
    assert told() == f"made-up tokens: {tokens}"
    plain = cli(*args, "--bytes", "--text", text)
    assert f"some.txt: {tokens}" in plain.out
    assert "folder" not in plain.out
    other = json.loads(cli("lab", "run", "rope-identity", "--model", path, "--json").out)
    assert other["result"]["text"] is None  # of its weights the first layer's are read, and no text
    assert cli("lab", "run", "gqa", "--json").json()["result"]["text"] is None


def test_several_checkpoints_are_told_apart() -> None:
    from types import SimpleNamespace as Checkpoint

    both = [Checkpoint(id="a", ids=(1,) * 1024, read=True), Checkpoint(id="b", ids=(1,) * 9, read=False),
            Checkpoint(id="c", ids=(1,) * 128, read=True)]
    assert read_on(both, "-") == "standard input: 1,024 tokens of a, 128 tokens of c; made-up tokens: 9 tokens of b"
    assert read_on([], None) is None


def test_a_text_without_tokens_is_too_short_for_all(cli: Any, folder: Any, tiny: Any, tmp_path: Path) -> None:
    said = {**tiny.config, "vocab_size": 256}
    path = folder(said, name="bytes", tensors=tiny.tensors(said))
    (tmp_path / "empty.txt").write_text("")
    for args in (("gqa", "--bytes", "--model", path), ("blocks",)):
        got = cli("lab", "run", *args, "--text", "empty.txt")
        assert (got.code, got.out) == (3, "")
        assert got.err.startswith("error[text-short]: ")


@pytest.mark.parametrize(("paths", "names"), [
    (("/x/a/g", "/y/a/g", "/b/g"), ["x/a/g", "y/a/g", "b/g"]), (("/x/g", "/y/h"), ["g", "h"]), ((), []),
])
def test_as_many_folders_as_tell_them_apart(paths: tuple[str, ...], names: list[str]) -> None:
    assert apart([Resolved(source="local", id=p.rpartition("/")[2], path=p) for p in paths]) == names
    hub = [Resolved(source="hub", id="a/b", path="/cache/x", revision=r) for r in ("main", "old")]
    assert apart(hub) == ["a/b@main", "a/b@old"]


def test_completion_offers_experiments() -> None:
    from llamactl.cli.lab import complete_words

    assert complete_words("rope") == ["rope-identity", "rope-stretch"]
    assert complete_words("") == ["list", "run", "all", *(c.name for c in lab.cards())]
