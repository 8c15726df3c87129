"""Where a turn's reused KV came from, why it was not all reused, and whether the new memory was stored."""

from dataclasses import dataclass
from enum import Enum

from kvasir.formats.digest import Digest


class Source(Enum):
    COLD = "cold"
    HOT = "hot"
    WARM = "warm"
    SHARED = "shared"
    REPLAY = "replay"
    WOKEN = "woken"  # hot, for a turn that waited until the agent was awake


class MissReason(Enum):
    """Why KV was not reused, or not all of it. A miss is never an error; each is counted."""

    NEW_AGENT = "new_agent"
    TEXT_DIFFERS = "text_differs"
    KV_IDENTITY_DIFFERS = "kv_identity_differs"
    STORE_UNREACHABLE = "store_unreachable"
    STORE_TIMEOUT = "store_timeout"
    STORE_REFUSED = "store_refused"
    BLOB_MISSING = "blob_missing"
    BLOB_DAMAGED = "blob_damaged"
    MANIFEST_INVALID = "manifest_invalid"
    NO_STATE_POINT = "no_state_point"
    COMPUTED = "computed"  # that was expected to be faster
    HEAD_WENT_BACK = "head_went_back"


_STORE_AWAY = (
    MissReason.STORE_UNREACHABLE,
    MissReason.STORE_TIMEOUT,
    MissReason.STORE_REFUSED,
    MissReason.HEAD_WENT_BACK,
)


@dataclass(frozen=True, slots=True)
class Miss:
    """A miss and its explanation for people. The detail never quotes a text."""

    reason: MissReason
    detail: str
    is_sealed: bool = False  # the store lacks the namespace's key: it will refuse the next call, too
    went_back: tuple[int, int] | None = None  # of HEAD_WENT_BACK: the version known here, the newest in the store

    @property
    def is_store_away(self) -> bool:
        """Whether the store did not answer, or not with the newest: it may have the agent's memory, whole."""
        return self.reason in _STORE_AWAY


class SnapshotState(Enum):
    NONE = "none"
    COMMITTED = "committed"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class SnapshotOutcome:
    """Reported at a turn's end. `version` is the newest durable version as far as is known, 0 when there is none."""

    state: SnapshotState
    version: int = 0
    reason: str = ""
    manifest: Digest | None = None
    written_bytes: int = 0


class Wake(Enum):
    """How a wake ended, as metrics count it."""

    HIDDEN = "hidden"  # it was over before the turn came
    WAITED = "waited"  # the turn waited for it
    UNUSED = "unused"  # no turn came in time
