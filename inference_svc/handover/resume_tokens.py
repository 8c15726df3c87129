"""The rest of replies that another engine began: each waits here for a reader with its token, which is unguessable,
used once, good for minutes, and for one credential. The turn goes on, and is remembered, also if nobody comes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvasir.errors import NotFound

from inference_svc.turns.turn_service import Choices

LIVES_S = 300.0
# Of a namespace: so many peers' turns make it forget its own oldest, and nobody else's. Each may hold what a reader may
# leave unread.
_MOST = 256


@dataclass(frozen=True, slots=True)
class WaitingReply:
    """It names its model and does not hold it: a reader may take the rest when another model is loaded."""

    choices: Choices
    request_id: str
    namespace: str
    caller: str
    model: str
    bytes_of: Callable[[int], bytes]  # of one of the model's tokens
    peer: str = ""  # that gave the turn, and may read it for the caller; empty: an engine of this store
    ends_s: float = 0.0


class ResumeTokens:
    """The tokens of one service, by text. On one event loop."""

    def __init__(self, new_token: Callable[[], str], clock: Callable[[], float]) -> None:
        """`new_token` gives at least 128 random bits; `clock` seconds, monotonic."""
        self._new_token = new_token
        self._clock = clock
        self._waiting: dict[str, WaitingReply] = {}

    def new(self) -> str:
        return self._new_token()

    def offer(self, token: str, reply: WaitingReply) -> None:
        self._forget_old()
        own = [name for name, other in self._waiting.items() if other.namespace == reply.namespace]
        if len(own) >= _MOST:
            del self._waiting[own[0]]
        self._waiting[token] = replace(reply, ends_s=self._clock() + LIVES_S)

    def claim(self, token: str, namespace: str, caller: str | None, peer: str | None = None) -> WaitingReply:
        """The reply of a token, which is used up. `peer`: the one that gave the turn reads it for the caller, or, with
        `caller` None, ends it for any. Raises NotFound (RESUME_TOKEN_UNKNOWN), the same for every reason."""
        self._forget_old()
        reply = self._waiting.get(token)
        is_own = reply is not None and reply.namespace == namespace and caller in (None, reply.caller)
        if reply is None or not is_own or peer not in (None, reply.peer):
            raise NotFound.of(
                "resume_token",
                "no reply waits for this token and this caller; retry with the turn's request_id",
                reason="RESUME_TOKEN_UNKNOWN",
            )
        return self._waiting.pop(token)

    def _forget_old(self) -> None:
        now_s = self._clock()
        for token in [token for token, reply in self._waiting.items() if reply.ends_s <= now_s]:
            del self._waiting[token]
