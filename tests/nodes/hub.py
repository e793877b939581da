"""A Hugging Face Hub on the loopback interface, with one data set `me/sums`. It answers the requests of `datasets`."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import SHUT_RDWR, create_server
from threading import Thread

COMMIT = "a" * 40
FILES = {
    "data/train.jsonl": b'{"question": "1+1", "answer": "2"}\n',
    "data/test.jsonl": b'{"question": "2+2", "answer": "4"}\n',
}


class Hub(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        _, found, rest = path.partition("/resolve/")
        if "/me/sums" not in path:
            self.answer(404, b"", "RepoNotFound")
        elif found:
            content = FILES.get(rest.partition("/")[2])
            self.answer(200 if content else 404, content or b"", "" if content else "EntryNotFound")
        elif "/tree/" in path or "/paths-info/" in path:
            folder = path.partition("/tree/")[2].partition("/")[2]
            files = [{"type": "file", "path": name, "size": len(data), "oid": "0"} for name, data in FILES.items()]
            listed = [file for file in files if str(file["path"]).startswith(folder)]
            listed += [] if folder else [{"type": "directory", "path": "data", "oid": "1"}]
            self.answer(200, json.dumps(listed).encode())
        else:
            known = {"id": "me/sums", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
            self.answer(200, json.dumps(known).encode())

    do_HEAD = do_POST = do_GET

    def answer(self, status: int, body: bytes, code: str = "") -> None:
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "ETag": f'"{len(body)}-{sum(body)}"'}
        for name, value in {**headers, **({"X-Error-Code": code} if code else {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub() -> Iterator[str]:
    """Serve the Hub, and yield its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def deaf() -> Iterator[tuple[str, list[int]]]:
    """Serve a Hub that closes each connection at once. Yield its address, and a list with their number so far."""
    count = [0]

    def hang_up() -> None:
        with suppress(OSError):
            while True:
                server.accept()[0].close()
                count[0] += 1

    with create_server(("127.0.0.1", 0)) as server:
        Thread(target=hang_up, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", count
        server.shutdown(SHUT_RDWR)


def opened() -> None:
    """Print, in a process of its own, what each argument names: (rows, pinned name) or the error."""
    from penstock.graph import Context
    from penstock.nodes.data import FilePrompts, open_prompts
    from penstock.runtime.cli.children import traced

    found: list[object] = []
    for data in sys.argv[1:]:
        try:
            source = open_prompts(Context(data=data))
            assert isinstance(source, FilePrompts)
            found.append([[row.prompt for row in source.rows], source.data])
        except ValueError as error:
            found.append(str(error))
    if "me/sums" in sys.argv:
        flags = traced("run", "aipo", ["--data", "me/sums", "--eval-split", "test", "--model", "new"])["flags"]
        found.append([flags["data"], flags["eval_data"]])
    print(json.dumps(found))


if __name__ == "__main__":
    opened()
