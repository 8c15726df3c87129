"""Other stores, by the names that the configuration gives them: how they are reached, and what their errors mean.

No RPC takes a host. A peer's refusal of *us* must not look like a refusal of our caller, so errors are rewritten.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvasir.clients import AioStoreClient
from kvasir.credentials import CredentialFileError
from kvasir.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvasirError,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
)

from cachestore_svc.config import PeerSettings

_ROUND_TRIP_S = 10.0


class Peers:
    """The peers of the configuration."""

    def __init__(self, settings: Mapping[str, PeerSettings]) -> None:
        self._settings = dict(settings)

    @property
    def names(self) -> list[str]:
        return sorted(self._settings)

    def connect(self, name: str) -> AioStoreClient:
        """A client of the peer; close it. Raises NotFound (PEER_UNKNOWN), FailedPrecondition (token, certificate)."""
        peer = self._settings.get(name)
        if peer is None:
            raise NotFound(
                f"no peer {name!r} in this store's configuration",
                reason="PEER_UNKNOWN",
                field="peer",
                metadata={"peer": name},
            )
        try:
            return AioStoreClient.connect(peer.address, token=peer.token(), tls=peer.tls, timeout_s=_ROUND_TRIP_S)
        except (CredentialFileError, InvalidArgument) as error:
            raise FailedPrecondition(f"peer {name}: {error}", reason="PEER_CONFIGURATION") from None


@contextmanager
def errors_of_peer(name: str) -> Iterator[None]:
    """Say whose error it is; what is the peer's affair becomes UNAVAILABLE or a failed precondition here."""
    try:
        yield
    except (NotFound, DataLoss) as error:
        raise type(error)(f"peer {name}: {error.message}", reason=error.reason, metadata=error.metadata) from None
    except (Unauthenticated, PermissionDenied) as error:
        raise FailedPrecondition(f"peer {name} refused us: {error.message}", reason="PEER_REFUSED") from None
    except (Unavailable, DeadlineExceeded) as error:
        raise Unavailable(f"peer {name}: {error.message}", reason="PEER_UNAVAILABLE", retry_after_s=5) from None
    except KvasirError as error:
        raise Unavailable(f"peer {name} failed: {error.message}", reason="PEER_FAILED", retry_after_s=60) from None
