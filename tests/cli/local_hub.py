"""A hub of models on loopback, over a directory OWNER/NAME: the parts of the hub's HTTP API that a loader asks for."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_COMMIT = "a" * 40


class _Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = Path()

    def do_GET(self) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._answer_api("/".join(parts[2:4]), is_tree="tree" in parts)
        else:
            self._answer_file(self.root.joinpath(*parts[:2], *parts[4:]))  # OWNER/NAME/resolve/COMMIT/FILE

    do_HEAD = do_GET  # noqa: N815  http.server's name

    def log_message(self, *_: object) -> None:
        pass

    def _answer_api(self, name: str, *, is_tree: bool) -> None:
        folder = self.root / name
        if not folder.is_dir():
            return self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        tree = [
            {"type": "file", "oid": "b" * 40, "size": path.stat().st_size, "path": name} for name, path in files.items()
        ]
        told = {"id": name, "sha": _COMMIT, "siblings": [{"rfilename": file} for file in files], "tags": []}
        return self._answer(200, json.dumps(tree if is_tree else told).encode(), {"Content-Type": "application/json"})

    def _answer_file(self, path: Path) -> None:
        if not path.is_file():
            return self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        data = path.read_bytes()
        return self._answer(200, data, {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": _COMMIT})

    def _answer(self, code: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@contextmanager
def local_hub(root: Path, cache: Path) -> Iterator[dict[str, str]]:
    """The environment of programs that are to use this hub, with a cache of their own."""
    handler = type("_HubOfTest", (_Hub,), {"root": root})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(cache)}
        server.shutdown()
        thread.join()
