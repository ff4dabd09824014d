"""One page served from this machine to itself: loopback only, nothing but that page, no other site's requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llamactl.errors import NotAvailable

_HEADERS = {
    "Content-Type": "text/html; charset=utf-8", "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Cross-Origin-Resource-Policy": "same-origin",
}


@contextmanager
def server(page: bytes, port: int) -> Iterator[tuple[str, Callable[[bool], None]]]:
    """(address, what serves until it is interrupted, first opening a browser if told to). port 0: any free one.

    Raises NotAvailable where the port is taken.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Page(BaseHTTPRequestHandler):
        """Answers for the page alone."""

        server_version, sys_version = "llamactl", ""

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def _answer(self, *, body: bool) -> None:
            # A name that a stranger's site has pointed at this machine is not ours (DNS rebinding).
            known = self.headers.get("Host") in allowed
            found = known and self.path.partition("?")[0] == "/"
            self.send_response(200 if found else 404 if known else 421)
            for name, value in _HEADERS.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(page) if found else 0))
            self.end_headers()
            if found and body:
                self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: standard error is for what goes wrong."""

    try:
        listening = ThreadingHTTPServer(("127.0.0.1", port), Page)
    except OSError as e:
        raise NotAvailable("port", f"port {port} of 127.0.0.1: {e.strerror or e}",
                           help="leave --port out, and a free one is taken") from None
    with listening:
        listening.daemon_threads = True
        at = listening.server_address[1]
        allowed = {f"127.0.0.1:{at}", f"localhost:{at}"}
        address = f"http://127.0.0.1:{at}/"

        def run(browser: bool) -> None:
            if browser:
                import webbrowser

                webbrowser.open(address)
            listening.serve_forever()

        yield address, run
