"""Every refusal of Kvasir, as types that a caller can act on.

The services raise these types. `kvasir.status` turns them into gRPC statuses with google.rpc details at the edge, and
back into the same types in the client. Any other exception of a service is a bug and becomes INTERNAL."""

from collections.abc import Mapping
from typing import Self


class KvasirError(Exception):
    """A refusal with a reason. `reason` is UPPER_SNAKE_CASE and stable; `metadata` is for programs."""

    reason = "INTERNAL"
    # Whether the service failed. Any other error is a refusal: the service did as it should.
    is_failure = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or type(self).reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.metadata = dict(metadata or {})

    @classmethod
    def of(
        cls,
        field: str,
        problem: object,
        *,
        reason: str | None = None,
        retry_after_s: float | None = None,
        **facts: object,
    ) -> Self:
        """An error about one field, whose name begins the message. `facts` become the metadata."""
        metadata = {name: str(fact) for name, fact in facts.items()}
        return cls(f"{field}: {problem}", reason=reason, field=field, retry_after_s=retry_after_s, metadata=metadata)


class InvalidArgument(KvasirError):
    """A field is wrong. `field` names it; the message has the expected value."""

    reason = "INVALID_FIELD"


class NotFound(KvasirError):
    """It does not exist, or belongs to another namespace."""

    reason = "NOT_FOUND"


class AlreadyExists(KvasirError):
    reason = "ALREADY_EXISTS"


class Conflict(KvasirError):
    """Another writer was first: the head moved, or the lease is fenced. gRPC: ABORTED."""

    reason = "HEAD_MOVED"


class FailedPrecondition(KvasirError):
    """Not possible in the present state: a blob is missing, a lease is held, an agent is pinned."""

    reason = "FAILED_PRECONDITION"


class ResourceExhausted(KvasirError):
    """A quota, the disk, the context or the memory is full. The message has the numbers."""

    reason = "RESOURCE_EXHAUSTED"


class DataLoss(KvasirError):
    """Stored bytes are damaged. They were reported and are not served."""

    reason = "BLOB_DAMAGED"
    is_failure = True


class Unavailable(KvasirError):
    """Cannot be reached, is starting, or is stopping. Safe to retry after `retry_after_s`."""

    reason = "UNAVAILABLE"


class DeadlineExceeded(KvasirError):
    reason = "DEADLINE_EXCEEDED"


class Cancelled(KvasirError):
    reason = "CANCELLED"


class Unauthenticated(KvasirError):
    """No credential, or a wrong one."""

    reason = "BAD_CREDENTIAL"


class PermissionDenied(KvasirError):
    """The credential's roles do not allow this."""

    reason = "ROLE_REQUIRED"


class Internal(KvasirError):
    """A bug of ours. The message names the request, nothing else."""

    reason = "INTERNAL"
    is_failure = True
