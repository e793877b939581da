"""The page of a run as a server on loopback: who may read it, and the stream that says when there is more.

Every request needs the token of this start, in the address or in the cookie that the first answer sets, and a `Host`
that is this machine, so that no page of another site can read anything by a name that it made point here. A request
changes nothing.
"""

import asyncio
import errno
import hmac
import json
import secrets
import socket
from base64 import b64encode
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from hashlib import sha256

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.runtime.cli.tracing import CommandError
from penstock.runtime.record.folder import RunFolder
from penstock.runtime.report.page import TEMPLATES
from penstock.runtime.report.write import Live

LOOPBACK = "127.0.0.1"
HOSTS = (LOOPBACK, "localhost")
# Seconds between two looks of a stream at the newest page.
LOOK_S = 0.25
HEARTBEAT_S = 10.0


def _inline(name: str) -> str:
    """What a policy calls the content of the element that a template puts this file into."""
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


class Guard:
    """Lets through whoever has the token and asks this machine by its own name; puts the headers on every answer."""

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self.app, self.token, self.cookie = app, token.encode(), cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        given = request.query_params.get("token", "")
        fault = self._fault(request, given)

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                new = dict(HEADERS)
                if given and not fault:
                    new["Set-Cookie"] = f"{self.cookie}={self.token.decode()}; HttpOnly; SameSite=Strict; Path=/"
                message["headers"] = [*message["headers"], *((k.lower().encode(), v.encode()) for k, v in new.items())]
            await send(message)

        answer: ASGIApp = PlainTextResponse(fault + "\n", 403) if fault else self.app
        await answer(scope, receive, sealed)

    def _fault(self, request: Request, given: str) -> str:
        host = request.headers.get("host", "").rpartition("@")[2].split(":")[0].lower()
        if host not in HOSTS:
            return f"403: given the host {host!r}; needed {' or '.join(HOSTS)}, as `penstock watch` printed it"
        words = (given, request.cookies.get(self.cookie, ""))
        if any(hmac.compare_digest(word.encode("utf-8", "replace"), self.token) for word in words):
            return ""
        found = "a wrong token" if any(words) else "no token"
        return f"403: given {found}; needed the whole address that `penstock watch` printed, with its ?token=…"


def make_app(live: Live, token: str, cookie: str) -> ASGIApp:
    """`/` is the newest page, `/events` the stream, `/live.js` what renews the page."""

    def newest(_: Request) -> Response:
        return HTMLResponse(live.snapshot.html)

    def script(_: Request) -> Response:
        return Response((TEMPLATES / "live.js").read_bytes(), media_type="text/javascript")

    async def events(request: Request) -> Response:
        known = request.headers.get("last-event-id", "")
        return StreamingResponse(stream(live, known), media_type="text/event-stream")

    routes = [Route("/", newest), Route("/live.js", script), Route("/events", events)]
    return Guard(Starlette(routes=routes), token, cookie)


async def stream(live: Live, known: str) -> AsyncIterator[str]:
    """A `page` for each page newer than `known`, a comment where there is none for a while, `ended` at the end."""
    clock = asyncio.get_running_loop().time
    said = clock()
    yield "retry: 2000\n\n"
    while True:
        shot = live.snapshot
        data = json.dumps({"rows": shot.rows, "bytes": shot.bytes})
        if shot.id != known:
            known, said = shot.id, clock()
            yield f"event: page\nid: {shot.id}\ndata: {data}\n\n"
        if shot.ended:
            yield f"event: ended\nid: {shot.id}\ndata: {data}\n\n"
            return
        if clock() - said >= HEARTBEAT_S:
            said = clock()
            yield ": still here\n\n"
        await asyncio.sleep(LOOK_S)


class _Server(uvicorn.Server):
    """Leaves signals to the command, which ends at once."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class PageServer:
    """Listens from when it is made. Raises CommandError for a port that cannot be had."""

    def __init__(self, folder: RunFolder, port: int) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((LOOPBACK, port))
        except OSError as error:
            self.socket.close()
            given = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had: {error.strerror}"
            raise CommandError(f"--port: given {port}, which {given}; needed a free one (0 takes any)") from None
        self.socket.listen(64)
        self.port: int = self.socket.getsockname()[1]
        self.token = secrets.token_urlsafe(32)
        self.live = Live(folder)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}/?token={self.token}"

    def serve(self) -> None:
        """Until a signal."""
        self.live.start()
        app = make_app(self.live, self.token, f"penstock_{self.port}")
        config = uvicorn.Config(
            app, log_config=None, log_level="critical", access_log=False, server_header=False, lifespan="off", ws="none"
        )
        _Server(config).run([self.socket])
