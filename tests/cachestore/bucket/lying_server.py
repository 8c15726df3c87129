"""A small S3 server for tests, a process's own threads on a real socket, which lies about what a test chooses."""

import hashlib
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

_PIECE_BYTES = 1 << 14
_KEY = re.compile(r"<Key>(.*?)</Key>")


@dataclass
class Request:
    """`name`: of the object, or "" for a listing, whose folder is `folder`."""

    method: str
    name: str
    folder: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """`pieces`: of the body, sent one by one."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    pieces: Iterable[bytes] = ()


Lie = Callable[[Request], Answer | None]


def whole(status: int, body: bytes = b"", **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"Content-Length": str(len(body)), **named}, (body,))


def headers(size_bytes: int, tag: str = '"1"') -> dict[str, str]:
    """Of an object."""
    return {"Content-Length": str(size_bytes), "ETag": tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}


class LyingServer:
    """Objects of one bucket. `lie` may answer any request; None lets the truth be told."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lie: Lie = lambda _: None
        self.requests = 0
        self.uplink_bytes_a_second = 0.0  # that all bodies share; 0: as fast as they come
        self._uplink = threading.Lock()
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def truth(self, request: Request) -> Answer:
        with self._lock:
            return _TRUTHS[request.method](self, request)

    def get(self, request: Request) -> Answer:
        if not request.name:
            return self.listing(request.folder)
        data = self.objects.get(request.name)
        if data is None:
            return whole(404, b"" if request.method == "HEAD" else b"<Error><Code>NoSuchKey</Code></Error>")
        return Answer(200, headers(len(data), tag_of(data)), () if request.method == "HEAD" else (data,))

    def put(self, request: Request) -> Answer:
        if source := request.headers.get("x-amz-copy-source"):
            data = self.objects[unquote(source).lstrip("/").split("/", 1)[-1]]
            self.objects[request.name] = data
            return whole(200, f"<CopyObjectResult><ETag>{tag_of(data)}</ETag></CopyObjectResult>".encode())
        there = self.objects.get(request.name)
        tag = request.headers.get("if-match")
        if (there is not None and "if-none-match" in request.headers) or (
            tag is not None and (there is None or tag_of(there) != tag)
        ):
            return whole(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        self.objects[request.name] = request.body
        return whole(200, ETag=tag_of(request.body))

    def delete(self, request: Request) -> Answer:
        """Of one object, or (POST) of those that the body names."""
        names = _KEY.findall(request.body.decode()) or [request.name]
        for name in names:
            self.objects.pop(unescape(name), None)
        deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
        return whole(200, f"<DeleteResult>{deleted}</DeleteResult>".encode())

    def listing(self, folder: str, names: list[str] | None = None, following: str = "") -> Answer:
        """The names of a folder, all on one page, or these with a token of the page that follows."""
        found = sorted(name for name in self.objects if name.startswith(folder)) if names is None else names
        keys = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(self.objects.get(name, b''))}</Size><ETag>&quot;1&quot;</ETag></Contents>"
            for name in found
        )
        more = f"<NextContinuationToken>{quote(following)}</NextContinuationToken>" if following else ""
        return whole(
            200,
            f"<ListBucketResult><IsTruncated>{'true' if following else 'false'}</IsTruncated>{more}{keys}"
            "</ListBucketResult>".encode(),
        )

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError, ValueError), client.makefile("rb") as lines:
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while (request := self._read(lines)) is not None:
                self.requests += 1
                answer = self.lie(request) or self.truth(request)
                head = [
                    f"HTTP/1.1 {answer.status} Said",
                    *(f"{name}: {value}" for name, value in answer.headers.items()),
                ]
                client.sendall("\r\n".join([*head, "", ""]).encode())
                for piece in answer.pieces:
                    client.sendall(piece)

    def _read(self, lines: BinaryIO) -> Request | None:
        if not (first := lines.readline()):
            return None
        method, target, _ = first.decode().split(" ")
        headers = {}
        while line := lines.readline().decode().strip():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = self._body(lines, int(headers.get("content-length", "0")))
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        is_listing = "list-type" in query
        name = "" if is_listing else unquote(parts.path).split("/", 2)[-1]
        return Request(method, name, query.get("prefix", [""])[0] if is_listing else "", headers, body)

    def _body(self, lines: BinaryIO, size_bytes: int) -> bytes:
        """In pieces, those of all requests one after the other."""
        if not self.uplink_bytes_a_second:
            return lines.read(size_bytes)
        body = b""
        while len(body) < size_bytes:
            with self._uplink:
                time.sleep(_PIECE_BYTES / self.uplink_bytes_a_second)
            if not (piece := lines.read(min(_PIECE_BYTES, size_bytes - len(body)))):
                raise OSError("the request ended")
            body += piece
        return body


_TRUTHS = {
    "GET": LyingServer.get,
    "HEAD": LyingServer.get,
    "PUT": LyingServer.put,
    "DELETE": LyingServer.delete,
    "POST": LyingServer.delete,
}


def tag_of(data: bytes) -> str:
    return f'"{hashlib.sha256(data).hexdigest()}"'
