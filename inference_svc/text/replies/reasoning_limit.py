"""A reply's budget of reasoning: tokens between the markers are counted, and the end is forced when they are spent,
spelled as the template writes it, so that the reply comes back from it as it was. Pure.
"""

from collections import deque
from dataclasses import dataclass

from inference_svc.text.token_text import TokenText


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    most_tokens: int
    start: str
    ends: tuple[str, ...]  # the marker behind it, and the beginning of a call
    spacing: str  # stands before the end, unless the reasoning ends with it
    closing: tuple[int, ...]  # tokens of the end
    spaced_closing: tuple[int, ...]  # and of the end with the spacing before it
    start_id: int | None  # the start, where it is one token
    is_open: bool = False  # the prompt begins the reasoning


class ReasoningWatch:
    """Follows one reply token by token. A draw may be planned while the token before it is not known: see `waits`."""

    def __init__(self, limit: ReasoningLimit, token_text: TokenText) -> None:
        self._limit = limit
        self._stream = token_text.stream()
        self._is_open = limit.is_open
        self._tail = ""  # of the text: may hold the beginning of a marker
        self._spent = 0
        self._forced: deque[int] = deque()
        self._close_if_spent()

    @property
    def forced(self) -> int | None:
        """The token that comes next, not the model's own."""
        return self._forced[0] if self._forced else None

    @property
    def banned(self) -> int | None:
        """A token that must not come next: nothing is left for more reasoning."""
        is_over = not self._is_open and self._left <= 0
        return self._limit.start_id if is_over else None

    @property
    def waits(self) -> bool:
        """Whether the next token depends on one that was drawn and is not known."""
        if self._forced or self._is_open:
            return self._left <= 1
        return self._left <= 0 and (self._limit.start_id is None or self._begins_start)

    def accept(self, token_id: int) -> None:
        was_open = self._is_open
        if self._forced:
            self._forced.popleft()
            self._read(self._stream.push(token_id))
            return
        self._read(self._stream.push(token_id))
        self._spent += was_open and self._is_open
        self._close_if_spent()

    @property
    def _begins_start(self) -> bool:
        """Whether the next token may open the reasoning letter by letter, which no ban of one token prevents."""
        start = self._limit.start
        return any(self._tail.endswith(start[:size]) for size in range(1, len(start)))

    @property
    def _left(self) -> int:
        return self._limit.most_tokens - self._spent

    def _read(self, text: str) -> None:
        self._tail += text
        while True:
            markers = self._limit.ends if self._is_open else (self._limit.start,)
            found = [(place + len(each)) for each in markers if (place := self._tail.find(each)) >= 0]
            if not found:
                longest = max(map(len, (*markers, self._limit.spacing)))
                self._tail = self._tail[-longest:]
                return
            self._is_open, self._tail = not self._is_open, self._tail[min(found) :]

    def _close_if_spent(self) -> None:
        if self._is_open and self._left <= 0:
            spacing = self._limit.spacing
            is_spaced = bool(self._spent) and self._tail.endswith(spacing)
            self._forced.extend(self._limit.closing if is_spaced else self._limit.spaced_closing)
