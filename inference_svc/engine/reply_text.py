"""The text of a reply, token by token: what the client may see of it, what ends it, and what is remembered. Pure."""

from collections.abc import Iterable, Sequence

from inference_svc.engine.api import FinishReason, SamplingParams
from inference_svc.text.token_text import TokenText


class StopScanner:
    """Finds the first stop string in a growing text, and holds back only what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text that is now certain not to belong to a stop string; sets `matched` when one is complete."""
        if not self._stops:
            return text
        self._held += text
        found = [(index, stop) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            index, self.matched = min(found)
            before, self._held = self._held[:index], ""
            return before
        certain = len(self._held) - self._possible_beginning()
        released, self._held = self._held[:certain], self._held[certain:]
        return released

    def rest(self) -> str:
        rest, self._held = self._held, ""
        return rest

    def _possible_beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest


class ReplyText:
    """What the generated tokens spell. Text may be held back: half a character, or what may begin a stop string."""

    def __init__(self, token_text: TokenText, sampling: SamplingParams, end_token_ids: Iterable[int]) -> None:
        self.finish_reason: FinishReason | None = None
        self._max_tokens = sampling.max_tokens
        self._stop_token_ids = {*end_token_ids, *sampling.stop_token_ids}
        self._stream = token_text.stream()
        self._scanner, self._has_stops = StopScanner(sampling.stop), bool(sampling.stop)
        self._visible: list[str] = []
        self._spelled: list[str] = []  # by generated token
        self._is_whole: list[bool] = []  # by generated token: whether a character ends with it

    @property
    def visible(self) -> str:
        return "".join(self._visible)

    @property
    def matched_stop(self) -> str:
        return self._scanner.matched or ""

    @property
    def remembered(self) -> list[str]:
        """What each remembered token spells if the reply ends now: no half character, and nothing of a stop string."""
        kept, chars = len(self._spelled), sum(map(len, self._spelled))
        most_chars = len(self.visible) if self.finish_reason is FinishReason.STOP_SEQUENCE else chars
        while kept and (chars > most_chars or not self._is_whole[kept - 1]):
            kept -= 1
            chars -= len(self._spelled[kept])
        return self._spelled[:kept]

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that the client may see now. Sets `finish_reason` if it is the last."""
        text = self._stream.push(token_id)
        self._spelled.append(text)
        self._is_whole.append(self._stream.is_whole)
        if token_id in self._stop_token_ids:
            self.finish_reason = FinishReason.STOP
            visible = self._scanner.rest()
        else:
            visible = self._scanner.push(text) if self._has_stops else text
            if self._has_stops and self._scanner.matched is not None:
                self.finish_reason = FinishReason.STOP_SEQUENCE
            elif len(self._spelled) >= self._max_tokens:
                self.finish_reason = FinishReason.LENGTH
                visible += self._scanner.rest()
        self._visible.append(visible)
        return visible

    def cut(self) -> str:
        """The reply ends here, in its middle; returns the text that was held back."""
        self.finish_reason = FinishReason.CANCELLED
        rest = self._scanner.rest()
        self._visible.append(rest)
        return rest
