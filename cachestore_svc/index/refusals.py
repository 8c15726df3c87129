"""The refusals of the index, in words that a caller can act on."""

import contextlib
from collections.abc import Iterator

from kvasir.errors import Conflict, DataLoss, FailedPrecondition, NotFound
from kvasir.formats.digest import Digest


def head_moved(head: int, expected: int) -> Conflict:
    return Conflict(
        f"head: expected version {expected}, it is {head}", reason="HEAD_MOVED", metadata={"head_version": str(head)}
    )


def no_agent(agent_id: str) -> NotFound:
    return NotFound(f"there is no agent {agent_id!r}", reason="AGENT_NOT_FOUND", metadata={"agent_id": agent_id})


def no_line(agent_id: str) -> NotFound:
    return NotFound(
        f"agent {agent_id!r} has no line of this KV identity",
        reason="VERSION_NOT_FOUND",
        metadata={"agent_id": agent_id},
    )


def missing(digest: Digest, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{what}: blob {digest} is not here; write it and commit again",
        reason="BLOB_MISSING",
        metadata={"digest": digest.hash},
    )


def unfit_blob(digest: Digest, problem: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"blob {digest} does not fit its manifest: {problem}", reason="BLOB_UNFIT", metadata={"digest": digest.hash}
    )


@contextlib.contextmanager
def reading_damage(catalog: str = "") -> Iterator[None]:
    """Raise as damage what a reader trips over in entries that the store never wrote: at a start, and in a check."""
    try:
        yield
    except (ValueError, TypeError, AssertionError) as error:
        raise index_damaged(f"it holds what nobody wrote ({type(error).__name__}: {error})", catalog) from error


def data_too_new(step: int, known: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the data directory is of a newer Kvasir: its database has step {step}, this one knows {known}",
        reason="DATA_TOO_NEW",
    )


def index_damaged(words: str, catalog: str = "") -> DataLoss:
    """`catalog`: where the index lies, unless it is a file."""
    return DataLoss(f"the index is damaged: {words}; stop the store and {bring_back(catalog)}", reason="INDEX_DAMAGED")


def bring_back(catalog: str) -> str:
    """What its operator does for a damaged index. Only one that is a file has a journal to recover from."""
    if catalog.startswith("s3://"):
        return (
            f"bring back the objects of {catalog}/index from a copy of the bucket or from its older versions; without "
            "these, begin a new store with another prefix"
        )
    if catalog:
        return (
            "bring its database back by the server's own tools (a sound standby, a backup of pg_basebackup "
            "or pg_dump), then start the store once with --accept-older"
        )
    return "run: kvasir store recover"
