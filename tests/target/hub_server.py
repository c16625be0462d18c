"""A hub on this machine: lists models and serves their files with range requests, counting what it sends."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STORAGE = "/storage/"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/?]+)(/revision/(?P<revision>[^/?]+))?(\?.*)?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/?]+)/resolve/(?P<revision>[^/]+)/(?P<file>[^?]+)")


class HubServer(ThreadingHTTPServer):
    """Serves the folders of `root`, `ORG/NAME` each; `sent` counts bytes by file, `tokens` who asked."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root = root
        self.sent: dict[str, int] = {}
        self.tokens: set[str | None] = set()
        self.gated: set[str] = set()

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers.get("Authorization"))
        if self.path.startswith(STORAGE):
            self._send_file(self.server.root / self.path.removeprefix(STORAGE))
            return
        listing, file = API.fullmatch(self.path), FILE.fullmatch(self.path)
        found = listing or file
        folder = self.server.root / found["repo"] if found else None
        if found is None or folder is None or not folder.is_dir():
            self._refuse(404, "RepoNotFound")
        elif found["repo"] in self.server.gated:
            self._refuse(403, "GatedRepo")
        elif found["revision"] not in (None, "main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif file is None:
            self._list(found["repo"], folder)
        elif not (folder / file["file"]).is_file():
            self._refuse(404, "EntryNotFound")
        elif file["file"].endswith(".safetensors"):
            self._redirect(f"/storage/{found['repo']}/{file['file']}")
        else:
            self._send_file(folder / file["file"])

    def _redirect(self, place: str) -> None:
        """Large files lie elsewhere, as on the real hub."""
        self.send_response(302)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, repository: str, folder: Path) -> None:
        siblings = [{"rfilename": f.name, "size": f.stat().st_size} for f in sorted(folder.iterdir())]
        answer = {"id": repository, "sha": COMMIT, "siblings": siblings}
        self._answer(200, json.dumps(answer).encode())

    def _send_file(self, path: Path) -> None:
        content, status = path.read_bytes(), 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if wanted:
            content, status = content[int(wanted[1]) : int(wanted[2]) + 1], 206
        self.server.sent[path.name] = self.server.sent.get(path.name, 0) + len(content)
        self._answer(status, content)

    def _answer(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve_hub(root: Path) -> Iterator[HubServer]:
    """A running hub over the folders of `root`."""
    server = HubServer(root)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
