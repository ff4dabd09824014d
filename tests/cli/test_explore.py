"""`llamactl explore`: where the page goes, what is said of it, and what --serve answers to whom."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


def test_a_page_is_written_and_told(cli: Any, tmp_path: Path) -> None:
    done = cli("explore", "gpt2", "llama-3-8b", "-o", "page.html")
    assert (done.code, done.err) == (0, "")
    text = (tmp_path / "page.html").read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "costed    1,536 models" in done.out
    assert "switches  RoPE, base 500,000; RMSNorm; gate and activation; feed-forward width;" in done.out
    assert f"size      {len(text.encode()):,} B" in done.out


def test_json_names_what_no_edit_makes(cli: Any, tmp_path: Path) -> None:
    done = cli("explore", "gpt2", "mixtral-8x7b", "-o", "page.html", "--json")
    result = done.json()["result"]
    assert [m["id"] for m in result["models"]] == ["gpt2", "mixtral-8x7b"]
    assert [name for name, _, _ in result["rest"]] == ["feed-forward"]
    assert result["page_bytes"] == (tmp_path / "page.html").stat().st_size
    assert (result["path"], result["url"]) == ("page.html", None)
    assert cli("explore", "gpt2", "-o", "two.html", "-q").out == "two.html\n"


@pytest.mark.parametrize(("args", "code", "word", "help_"), [
    ((), 2, "nothing says where", "-o page.html"),
    (("gpt2",), 2, "nothing says where", "--serve"),
    (("gpt2", "-o", "page.pdf"), 2, "does not end in .html", ""),
    (("gpt3", "-o", "page.html"), 4, "gpt3", ""),
    (("gpt2", "llama-3-8b", "gpt2", "-o", "page.html"), 2, "unexpected extra argument", ""),
    (("gpt2", "-o", "no/such/page.html"), 5, "could not be written", ""),
    (("-o", "page.html"), 2, "no MODEL given", "try:"),
    (("gpt2", "--serve", "--port", "70000"), 2, "70000", ""),
    (("gpt2", "-o", "page.html", "--port", "80"), 2, "--port is for --serve", "add --serve"),
    (("gpt2", "-o", "page.html", "--no-browser"), 2, "--no-browser is for --serve", "add --serve"),
    (("gpt2", "", "-o", "page.html"), 2, "no MODEL given", ""),
])
def test_what_is_wrong_is_one_line(cli: Any, tmp_path: Path, args: tuple[str, ...], code: int, word: str,
                                   help_: str) -> None:
    done = cli("explore", *args)
    assert (done.code, done.out) == (code, "")
    assert word in done.err.splitlines()[0]
    assert help_ in done.err
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_is_there_stays(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("mine")
    done = cli("explore", "gpt2", "-o", "page.html")
    assert (done.code, done.out) == (5, "")
    assert (tmp_path / "page.html").read_text() == "mine"
    assert cli("explore", "gpt2", "-o", "page.html", "--force").code == 0
    assert (tmp_path / "page.html").stat().st_size > 50_000


def test_a_local_path_is_not_on_the_page(cli: Any, folder: Any, tmp_path: Path) -> None:
    """A page is passed on; where its model lay on somebody's disk is nobody's business."""
    made = folder()
    assert cli("explore", made, "-o", "page.html").code == 0
    text = (tmp_path / "page.html").read_text()
    assert str(tmp_path) not in text
    assert Path(made).name in text


INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background of a shell it is ignored from the start
from llamactl.cli.app import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture
def served(environment: Callable[..., dict[str, str]], tmp_path: Path) -> Iterator[tuple[int, Any]]:
    """(port, process) of `explore gpt2 --serve`."""
    line = [sys.executable, "-c", INTERRUPTIBLE, "explore", "gpt2", "--serve", "--no-browser", "-q"]
    process = subprocess.Popen(line, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)
    assert process.stdout is not None
    found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline().strip())
    assert found
    yield int(found[1]), process
    process.kill()
    process.communicate()


def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    out = answer.status, answer.read(), dict(answer.headers)
    connection.close()
    return out


def test_the_page_is_served_to_this_machine_alone(served: tuple[int, Any], cli: Any, tmp_path: Path) -> None:
    port, process = served
    status, body, headers = ask(port)
    cli("explore", "gpt2", "-o", "page.html")
    assert (status, body) == (200, (tmp_path / "page.html").read_bytes())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert ask(port, Host=f"localhost:{port}")[0] == 200
    assert ask(port, method="HEAD")[:2] == (200, b"")
    assert ask(port, "/?a=1")[0] == 200
    for path in ("/etc/passwd", "/../x", "/page.html"):
        assert ask(port, path)[:2] == (404, b"")
    # a name that a stranger points at this machine
    assert ask(port, Host="example.org")[:2] == (421, b"")
    assert ask(port, Host=f"example.org:{port}")[:2] == (421, b"")
    assert ask(port, method="POST")[0] == 501
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
                 if line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}")]
    assert listening == [f"0100007F:{port:04X}"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, "")
    assert err == "error[interrupted]: interrupted\n"


def test_a_taken_port_is_named(served: tuple[int, Any], cli: Any) -> None:
    port, _ = served
    done = cli("explore", "gpt2", "--serve", "--no-browser", "--port", str(port))
    assert (done.code, done.out) == (4, "")
    assert f"error[port]: port {port} of 127.0.0.1" in done.err


def test_the_browser_is_opened_at_the_page(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import webbrowser
    from http.server import ThreadingHTTPServer

    seen: list[str] = []
    monkeypatch.setattr(webbrowser, "open", seen.append)
    monkeypatch.setattr(ThreadingHTTPServer, "serve_forever", lambda self: None)
    done = cli("explore", "gpt2", "--serve", "--json")
    assert seen == [done.json()["result"]["url"]]
    seen.clear()
    cli("explore", "gpt2", "--serve", "--no-browser")
    assert seen == []
