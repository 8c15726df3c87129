"""Addresses of services, as people write them: unix:/path, host:port, [v6 address]:port."""

import ipaddress
import os
import socket
from dataclasses import dataclass
from pathlib import Path

# sockaddr_un holds 104 bytes on macOS and 108 on Linux, with the NUL; one limit for both.
MAX_SOCKET_PATH_BYTES = 100
# Where `kvasir pair` waits if nothing else does, so that on one machine the code is enough: no gateway takes it itself.
PAIRING_PORT = 8643
TCP_FORMS = "host:port or [v6 address]:port"


class AddressError(ValueError):
    """The text is no address. The message names the expected form."""


class AddressTaken(AddressError):
    """Nothing can listen there now. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Address:
    """A Unix socket's path, or a host and port."""

    socket_path: Path | None = None
    host: str = ""
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether no other machine can reach it. A name other than localhost could resolve to anything."""
        if self.socket_path is not None:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_everywhere(self) -> bool:
        """Whether it means all addresses of a machine: something can listen there, and nobody can dial it."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def __str__(self) -> str:
        """As gRPC wants it."""
        if self.socket_path is not None:
            return f"unix:{self.socket_path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, forms: str = f"unix:/path, {TCP_FORMS}") -> Address:
    """`forms`: those of the caller, for the error. Raises AddressError: no address, a relative socket path, or one
    longer than systems allow."""
    if text.startswith("unix:"):
        return Address(socket_path=_socket_path(text.removeprefix("unix:")))
    if text.isascii() and text.isdigit():
        raise AddressError(f"{text!r}: expected a host before the port, as 127.0.0.1:{text}")
    host, colon, port = text.rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise AddressError(f"{text!r}: expected {forms}")
    if (":" in host) != is_v6 or "/" in host:
        raise AddressError(f"{text!r}: expected host:port, with a v6 address in brackets")
    if len(port) > len("65535") or int(port) > 65535:
        raise AddressError(f"{text!r}: expected a port of at most 65535")
    return Address(host=host[1:-1] if is_v6 else host, port=int(port))


def check_operators_address(text: str) -> str:
    """The address, if it is HOST:PORT of this machine alone: its page needs no credential. Raises AddressError."""
    address = parse_address(text, TCP_FORMS)
    if address.socket_path is not None or not address.is_loopback:
        raise AddressError(f"{text}: metrics have no TLS and no credential: listen on 127.0.0.1:PORT")
    return text


def check_endpoint(endpoint: str) -> str:
    """Where traces may go, if it is https, or http to this machine. Raises AddressError."""
    if "@" in endpoint:  # options are shown: a password among them would be, too
        raise AddressError("expected http://127.0.0.1:PORT or https://HOST:PORT, with no user and no password in it")
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("http", "https"):
        raise AddressError(f"{endpoint!r}: expected http://127.0.0.1:PORT or https://HOST:PORT")
    if scheme == "http" and not parse_address(rest).is_loopback:
        raise AddressError(f"{endpoint}: it is another machine, so https is needed")
    return endpoint


def _socket_path(text: str) -> Path:
    size_bytes = len(os.fsencode(text))
    if not text.startswith("/") or "\0" in text:
        raise AddressError(f"unix:{text!r}: expected an absolute path")
    if "%" in text:
        # gRPC decodes it: the socket would be made outside of the directory that was looked at.
        raise AddressError(f"unix:{text}: a socket's path may have no %: choose another")
    if size_bytes > MAX_SOCKET_PATH_BYTES:
        raise AddressError(
            f"unix:{text}: {size_bytes} bytes; a socket may have {MAX_SOCKET_PATH_BYTES}: choose a shorter path"
        )
    return Path(text)


def accepts(text: str) -> bool:
    """Whether something listens at an address. The system answers for a process that is frozen."""
    address = parse_address(text)
    try:
        if address.socket_path is not None:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                probe.connect(str(address.socket_path))
        else:
            socket.create_connection((address.host, address.port), timeout=1.0).close()
    except OSError:
        return False
    return True
