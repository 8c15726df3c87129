"""Certificates in files, read so that gRPC can only take them for themselves."""

import ssl
from pathlib import Path


def read_certificates(path: Path) -> bytes:
    """A PEM file. Raises OSError, and ValueError for a file without a certificate: gRPC takes an empty one as the
    authorities of the system, and reports others only as a connection that cannot be made."""
    pem = path.read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError):
        raise ValueError(f"{path}: expected PEM with a certificate") from None
    return pem
