"""A reward server on the loopback interface, which answers as a test says."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

Asked = dict[str, Any]


@dataclass
class Server:
    """The server's record: `asked` has the bodies of all POST requests, `most` the largest number at once."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    gets: int = 0
    now: int = 0
    most: int = 0

    def tries(self, response: str) -> int:
        return sum(each["response"] == response for each in self.asked)


@contextmanager
def serving(
    answer: Callable[[Asked, Server], tuple[int, bytes]], headers: Mapping[str, str] | None = None, unsent: int = 0
) -> Iterator[Server]:
    """Serve `answer`, which gives (status, body) for a request. `unsent` bytes are announced but never sent."""
    server, lock = Server(), Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            server.gets += 1
            self.send_error(405)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                server.asked.append(asked)
                server.tokens.add(self.headers.get("Authorization", ""))
                server.now += 1
                server.most = max(server.most, server.now)
            try:
                status, body = answer(asked, server)
            finally:
                with lock:
                    server.now -= 1
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body) + unsent))
            self.end_headers()
            self.wfile.write(body)

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # all clients connect at once

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore errors: a client that has given up is no fault of the server."""

    http = Quiet(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}/reward"
    thread = Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
