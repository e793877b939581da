"""The server of a run's page on loopback: access control, and the stream that announces new pages.

Every request needs the token of this start, in the address or in the cookie that the first answer sets, and a `Host`
that is this machine. So no page of another site can read anything by a host name that it made resolve to loopback (DNS
rebinding). A request changes nothing.
"""

import errno
import hmac
import json
import secrets
import sys
from base64 import b64encode
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from time import monotonic, sleep
from urllib.parse import parse_qs, urlsplit

from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.page import TEMPLATES
from penstock.runtime.report.write import Live

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
# Seconds between two checks of a stream for a newer page.
LOOK_S = 0.25
HEARTBEAT_S = 10.0


def _inline(name: str) -> str:
    """The hash by which a Content-Security-Policy allows the element into which a template puts this file."""
    digest = sha256(f"\n{(TEMPLATES / name).read_text()}\n".encode()).digest()
    return f"'sha256-{b64encode(digest).decode()}'"


HEADERS = {
    "Content-Security-Policy": "; ".join((
        "default-src 'none'", f"script-src 'self' {_inline('page.js')}", f"style-src-elem {_inline('style.css')}",
        "style-src-attr 'unsafe-inline'", "img-src data:", "connect-src 'self'", "base-uri 'none'",
        "form-action 'none'", "frame-ancestors 'none'",
    )),
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}  # fmt: skip


class PageServer(ThreadingTCPServer):
    """Listens as soon as it is constructed. Raises CommandError for a port that is not available."""

    request_queue_size = 64

    daemon_threads = allow_reuse_address = True

    def __init__(self, folder: RunFolder, port: int) -> None:
        try:
            super().__init__((LOOPBACK, port), Page)
        except OSError as error:
            given = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            raise CommandError(f"--port: given {port}, which {given}; needed a free one (0 takes any)") from None
        self.port: int = self.server_address[1]
        # Other users of this machine can connect to loopback, too.
        self.token = secrets.token_urlsafe(32)
        self.live = Live(folder)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Serve until a signal."""
        self.live.start()
        self.serve_forever()

    def handle_error(self, request: object, client_address: object) -> None:
        # A browser may close the connection at any time.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Page(BaseHTTPRequestHandler):
    """`/` is the newest page, `/events` the stream, `/live.js` the script that renews the page."""

    server: PageServer
    server_version, sys_version = "penstock", ""
    # Seconds for a browser to send its request.
    timeout = 60.0

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        """Answer a request that has the token and a host name of this machine."""
        try:
            url = urlsplit(self.path)
        except ValueError:
            self._answer(400, "400: given an address that is none\n")
            return
        cookie = f"penstock_{self.server.port}"
        host = self.headers.get("host", "").rpartition("@")[2].split(":")[0].lower()
        # Parsed by hand: other servers on this machine set cookies, too, and a parser would stop at a malformed one.
        cookies = dict(pair.strip().partition("=")[::2] for pair in self.headers.get("cookie", "").split(";"))
        given = parse_qs(url.query).get("token", [""])[-1]
        words, token = (given, cookies.get(cookie, "")), self.server.token
        kept = {"Set-Cookie": f"{cookie}={token}; HttpOnly; SameSite=Strict; Path=/"} if given else {}
        if host not in HOSTS:
            needed = f"{' or '.join(HOSTS)}, as `penstock watch` printed it"
            self._answer(403, f"403: given the host {host!r}; needed {needed}\n")
        elif not any(hmac.compare_digest(word.encode("utf-8", "replace"), token.encode()) for word in words):
            found = "a wrong token" if any(words) else "no token"
            needed = "the whole address that `penstock watch` printed, with its ?token=…"
            self._answer(403, f"403: given {found}; needed {needed}\n")
        elif url.path == "/":
            self._answer(200, self.server.live.snapshot.html, "text/html", kept)
        elif url.path == "/live.js":
            self._answer(200, (TEMPLATES / "live.js").read_text(), "text/javascript", kept)
        elif url.path == "/events":
            self._answer(200, "retry: 2000\n\n", "text/event-stream", kept)
            self._stream(self.headers.get("last-event-id", ""))
        else:
            self._answer(404, "404: there is no such page\n")

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request, or one with another method than GET."""
        self._answer(int(code), f"{int(code)}: {message or 'given a request that is not answered here'}\n")

    def _answer(self, status: int, text: str, kind: str = "text/plain", more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", **HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def _stream(self, known: str) -> None:
        """Send a `page` event for each page newer than `known`, a comment as heartbeat, and `ended` at the end."""
        said, ended = monotonic(), False
        while not ended:
            shot = self.server.live.snapshot
            ended = shot.ended
            data = f"id: {shot.id}\ndata: {json.dumps({'rows': shot.rows, 'bytes': shot.bytes})}\n\n"
            text = f"event: page\n{data}" if shot.id != known else ""
            text += f"event: ended\n{data}" if ended else ""
            if not text and monotonic() - said >= HEARTBEAT_S:
                text = ": still here\n\n"
            if text:
                known, said = shot.id, monotonic()
                self.wfile.write(text.encode())
            # Each reader has a thread that sleeps here: cheap, since there are few readers.
            sleep(LOOK_S)
