"""The refusals of a commit, in words that a caller can act on."""

from kvasir.errors import Conflict, FailedPrecondition
from kvasir.formats.digest import Digest


def head_moved(head: int, expected: int) -> Conflict:
    return Conflict(
        f"head: expected version {expected}, it is {head}", reason="HEAD_MOVED", metadata={"head_version": str(head)}
    )


def missing(digest: Digest, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{what}: blob {digest} is not here; write it and commit again",
        reason="BLOB_MISSING",
        metadata={"digest": digest.hash},
    )


def unfit_blob(digest: Digest, problem: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"blob {digest} does not fit its manifest: {problem}",
        reason="BLOB_UNFIT",
        metadata={"digest": digest.hash},
    )
