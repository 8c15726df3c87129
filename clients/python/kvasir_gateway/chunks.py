"""A reply as a stream: each event of the engine in an API's words. An API has a class of these."""

from abc import ABC, abstractmethod

from kvasir.clients import Reply
from kvasir.inference.v1 import inference_pb2 as pb

from kvasir_gateway.turn import Asked


class ReplyStream(ABC):
    """An answer as a stream. `frames` and `end` give text that is sent in one piece."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    @property
    def sent(self) -> int:
        """How many events there were, where an API numbers them."""
        return 0

    @abstractmethod
    def frames(self, event: pb.GenerateResponse) -> str:
        """What an event of the engine becomes."""

    def end(self) -> str:
        return ""


class Chunks(ReplyStream):
    """An answer in an API's own words, with a method for each kind of event."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(asked)
        self._reply = Reply()  # without its texts

    @property
    def _model(self) -> str:
        return self._reply.started.model or self._asked.model

    def frames(self, event: pb.GenerateResponse) -> str:
        if (kind := event.WhichOneof("event")) == "delta":
            self._reply.choice(event.delta.choice).count(event.delta)
            return self._delta(event.delta)
        self._reply.add(event)
        if kind == "started":
            return self._begin()
        return self._wait() if kind == "prefill_progress" else self._finish(event.finished)

    def _begin(self) -> str:
        return ""

    @abstractmethod
    def _wait(self) -> str:
        """Something while the prompt is computed: proxies and clients see that the connection lives."""

    @abstractmethod
    def _delta(self, delta: pb.Delta) -> str:
        """New tokens."""

    @abstractmethod
    def _finish(self, finished: pb.Finished) -> str:
        """The end of the reply."""


class Blocks(Chunks):
    """An answer whose API has thoughts and texts as blocks, which open and close one after the other."""

    def __init__(self, asked: Asked, *, shows_thinking: bool = True) -> None:
        super().__init__(asked)
        self._kinds = ("thinking", "text") if shows_thinking else ("text",)
        self._kind = self._text = ""  # of the block that is open

    def _delta(self, delta: pb.Delta) -> str:
        frames = ""
        for kind, text in (("thinking", delta.reasoning_text), ("text", delta.text)):
            if text and kind in self._kinds:
                frames += self._open(kind) + self._more(kind, text)
                self._text += text
        return frames

    def _open(self, kind: str) -> str:
        """Begin a block of this kind, unless it is the one that is open."""
        if kind == self._kind:
            return ""
        closed, self._kind = self._close(), kind
        return closed + self._opened(kind)

    def _close(self) -> str:
        kind, text = self._kind, self._text
        self._kind = self._text = ""
        return self._closed(kind, text) if kind else ""

    @abstractmethod
    def _opened(self, kind: str) -> str:
        """A block begins."""

    @abstractmethod
    def _more(self, kind: str, text: str) -> str:
        """More of a block."""

    @abstractmethod
    def _closed(self, kind: str, text: str) -> str:
        """A block with this text ends."""
