"""The refusals of the index, in words that a caller can act on."""

from kvasir.errors import Conflict, FailedPrecondition, NotFound
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
