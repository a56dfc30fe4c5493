"""A stand-in for the hub on 127.0.0.1: two commits of a repository, and a script of faults for each file.

Answers what huggingface_hub's protocol needs: the listing of a revision, and files with ranges by way of a redirect.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "someone/tiny"
COMMIT, NEXT_COMMIT = "a" * 40, "b" * 40
LARGE_NBYTES = 100_000  # files from this size on are large ones, with a SHA-256 in the listing


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    kind: cut (after `share` of the answer), stall (the same, but the line stays open), status, wrong (bytes), pointer,
    refused (`status`, before the redirect), no_range (200 with the whole file), bad_range (another range than asked
    for), longer (than the listing says), move (main, then answer as usual).
    """

    kind: str
    share: float = 0.5
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)


class HubServer:
    """Files by commit, and what was asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.commits = {COMMIT: dict(files), NEXT_COMMIT: dict(files)}
        self.main = COMMIT
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.always: dict[str, Fault] = {}
        self.listing_faults: deque[Fault] = deque()
        self.requests: list[tuple[str, str | None]] = []  # (path, range), listings as "listing"
        self.tokens: list[str | None] = []
        self.sent_nbytes = 0
        self.released = threading.Event()  # stalled answers wait for it
        self.endpoint = ""

    def served(self, path: str) -> list[str | None]:
        """Return the ranges that were asked of a file, in order."""
        return [span for name, span in self.requests if name == path]

    def listing(self, commit: str) -> dict:
        siblings = []
        for name, data in self.commits[commit].items():
            entry = {"rfilename": name, "size": len(data), "blobId": git_id(data)}
            if len(data) >= LARGE_NBYTES:
                entry["blobId"] = git_id(
                    b"version https://git-lfs.github.com/spec/v1\n" + name.encode()
                )
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        return {"id": REPO, "sha": commit, "siblings": siblings}

    @contextlib.contextmanager
    def running(self) -> Iterator[HubServer]:
        server = _Server(("127.0.0.1", 0), _handler(self))
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            self.released.set()
            server.shutdown()
            server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients that hang up are what is tested."""


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if path.startswith("/api/models/"):
                    self._list(path)
                elif path.startswith("/cdn/"):
                    self._serve(*path.removeprefix("/cdn/").split("/", 1))
                else:
                    self._redirect(path)

        def _list(self, path: str) -> None:
            hub.requests.append(("listing", None))
            hub.tokens.append(self.headers.get("authorization"))
            if hub.listing_faults:
                fault = hub.listing_faults.popleft()
                return self._status(fault.status, fault.headers)
            revision = path.rpartition("/revision/")[2]
            commit = hub.main if revision == "main" else revision
            if f"/api/models/{REPO}/" not in path:
                return self._status(401, {"X-Error-Code": "RepoNotFound"})
            if commit not in hub.commits:
                return self._status(404, {"X-Error-Code": "RevisionNotFound"})
            return self._answer(200, json.dumps(hub.listing(commit)).encode(), {})

        def _redirect(self, path: str) -> None:
            commit, _, name = path.removeprefix(f"/{REPO}/resolve/").partition("/")
            fault = hub.always.get(name)
            if fault is not None and fault.kind == "refused":
                return self._status(fault.status, fault.headers)
            return self._answer(
                302, b"", {"Location": f"/cdn/{commit}/{name}", "X-Repo-Commit": commit}
            )

        def _serve(self, commit: str, name: str) -> None:
            span = self.headers.get("range")
            hub.requests.append((name, span))
            data = hub.commits[commit].get(name)
            fault = hub.faults[name].popleft() if hub.faults[name] else hub.always.get(name)
            kind = fault.kind if fault else ""
            if kind == "status":
                return self._status(fault.status, fault.headers)
            if data is None:
                return self._status(404, {"X-Error-Code": "EntryNotFound"})
            if kind == "move":
                hub.main = NEXT_COMMIT
            if kind == "wrong":
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            if kind == "pointer":
                data = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
            if kind == "longer":
                data += b"tail"
            if not span or kind in ("no_range", "pointer", "longer"):
                return self._body(200, data, {}, fault)
            first, last = (int(n) for n in span.removeprefix("bytes=").split("-"))
            if kind == "bad_range":
                first = max(0, first - 1)
            part = data[first : last + 1]
            return self._body(206, part, {"Content-Range": f"bytes {first}-{last}/{len(data)}"}, fault)  # fmt: skip

        def _body(self, status: int, data: bytes, headers: dict[str, str], fault: Fault | None) -> None:  # fmt: skip
            kind = fault.kind if fault else ""
            upto = (
                int(len(data) * fault.share) if kind in ("cut", "stall", "no_range") else len(data)
            )
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data[:upto])
            self.wfile.flush()
            hub.sent_nbytes += upto
            if upto < len(data):
                if kind == "stall":
                    hub.released.wait(30)
                self.close_connection = True

        def _status(self, status: int, headers: dict[str, str]) -> None:
            self._answer(status, b"{}", headers)

        def _answer(self, status: int, data: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

    return Handler
