"""Takes the turns of a request in from another engine. They compute nothing, and leave nothing, before the commit."""

import asyncio
from collections import defaultdict
from collections.abc import Mapping

from kvasir.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from kvasir.formats.block_file import MAX_HEADER_BYTES
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.engine import Engine
from inference_svc.handover.passing import Opening, Promise, Stand
from inference_svc.handover.resume_tokens import LIVES_S, ResumeTokens, WaitingReply
from inference_svc.model.prompting import Tokenized
from inference_svc.turns.progress import TakenTurn
from inference_svc.turns.turn_data import TurnRequest
from inference_svc.turns.turn_service import Choices, TurnService

_MORE_FILES = 16  # beside the blocks of each group: its tail, and the states at rewind points


class Taking:
    """One request's turns on their way in. On the event loop; `close` it whatever happens."""

    def __init__(
        self,
        turns: TurnService,
        engine: Engine,
        room: SharedRoom,
        tokens: ResumeTokens,
        opening: Opening,
        request: TurnRequest,
    ) -> None:
        """`request`: the opening's, checked. `room` is for files that are not KV yet. Raises InvalidArgument."""
        if not opening.choices or not set(opening.choices) <= set(range(request.choices)):
            raise InvalidArgument.of("opening.choices", "expected some of the request's")
        self._turns = turns
        self._model, self._token_text = engine.model, engine.token_text
        self._room = room
        self._tokens = tokens
        self._opening = opening
        self._request = request
        self._files: dict[int, list[bytes]] = defaultdict(list)
        self._stands: dict[int, Stand] = {}
        self._held_bytes = 0
        self._taken: Mapping[int, TakenTurn] = {}
        self._choices: Choices | None = None
        self._is_owned = False

    @property
    def prompt(self) -> Tokenized:
        return self._opening.begun.prompt.tokens

    @property
    def is_whole(self) -> bool:
        ends = (self._stands.get(choice) for choice in self._opening.choices)
        return all(stand is not None and stand.files == 0 for stand in ends)

    def most_file_bytes(self) -> int:
        model = self._model
        rows = max([model.kv_bytes_per_token, *model.window_bytes_per_token.values()]) * BLOCK_TOKENS
        return max(rows, model.state_bytes) + MAX_HEADER_BYTES

    async def hold(self, size_bytes: int) -> None:
        """Wait for room for a file's bytes. Raises InvalidArgument for one that no turn of this model has."""
        if size_bytes > self.most_file_bytes():
            raise InvalidArgument(
                f"file: expected at most {self.most_file_bytes()} bytes, got {size_bytes}", field="file.digest"
            )
        await self._room.wait_for(self._request.namespace, size_bytes)
        self._held_bytes += size_bytes

    def add_file(self, choice: int, data: bytes) -> None:
        """The next file of a choice. Raises InvalidArgument, and ResourceExhausted for more than a turn may have."""
        stand = self._stands.get(choice)
        if choice not in self._opening.choices or (stand is not None and stand.files == 0):
            raise InvalidArgument.of("file.choice", f"no file of choice {choice} was announced")
        tokens = len(self._opening.begun.prompt.tokens.ids) + self._opening.begun.max_tokens
        groups = 1 + len(self._model.window_bytes_per_token)
        if len(self._files[choice]) >= groups * (tokens // BLOCK_TOKENS + 1) + _MORE_FILES:
            raise ResourceExhausted("file: a turn of so many tokens has fewer files")
        self._files[choice].append(data)
        if stand is not None:
            self._stands[choice] = Stand(choice, stand.carried, stand.told_chars, stand.files - 1)

    def add_stand(self, stand: Stand) -> None:
        if stand.choice not in self._opening.choices or stand.choice in self._stands:
            raise InvalidArgument.of("stand.choice", "expected each of the opening's once")
        self._stands[stand.choice] = stand

    async def prepare(self) -> Promise:
        """Bring everything into the engine, and wait until it could compute. Raises what keeps it from that."""
        if not self.is_whole:
            raise FailedPrecondition("commit: files are missing", reason="HANDOVER_NOT_NOW")
        self._taken = {
            choice: TakenTurn(self._opening.begun, stand.carried, stand.told_chars, self._files[choice])
            for choice, stand in self._stands.items()
        }
        self._choices = self._turns.take_over(self._request, self._taken)
        # Not `gather`: whoever is cancelled here must not take the futures along, which the turns answer.
        ready, _ = await asyncio.wait(
            [taken.ready for taken in self._taken.values()], return_when=asyncio.FIRST_EXCEPTION
        )
        for each in ready:
            each.result()
        self._give_back()
        return Promise(self._tokens.new(), LIVES_S)

    def own(self, promise: Promise) -> None:
        """The other engine has given the turns away: they are this engine's, and their reader may come."""
        assert self._choices is not None
        self._is_owned = True
        request = self._request
        whose = request.request_id, request.namespace, request.origin.caller
        model = self._model.name, self._token_text.bytes_of
        reply = WaitingReply(self._choices, *whose, *model, self._opening.begun.peer)
        self._tokens.offer(promise.resume_token, reply)

    async def go_on(self) -> None:
        """After `own`: compute the very next token. Where that cannot be, the turns end with the reason."""
        assert self._choices is not None
        try:
            await self._turns.own(tuple(self._taken.values()))
        except BaseException:
            self._choices.cancel()  # a turn that is held for good keeps its agent's next turns waiting
            raise

    def close(self) -> None:
        """The link is over. Turns that were not given away end here. Idempotent."""
        if self._choices is not None and not self._is_owned:
            self._choices.cancel()
        for taken in self._taken.values():
            taken.failed(Unavailable("the hand-over was given up"))
        self._give_back()

    def _give_back(self) -> None:
        held, self._held_bytes = self._held_bytes, 0
        self._room.give_back(self._request.namespace, held)
        self._files.clear()
