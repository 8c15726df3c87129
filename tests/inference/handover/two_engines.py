"""Two engines that are each other's peer, on one store; and turns that move from one to the other while they speak."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.clients import AioInferenceClient
from kvasir.clients.inference_client_turns import Moved, Reply
from kvasir.errors import KvasirError, Unavailable
from kvasir.inference.v1 import inference_pb2 as pb

from tests.inference.handover.failures.cut_link import CutLink
from tests.running.system_fixtures import ENGINE_SERVICE, House, Service


class TwoEngines:
    """Engine "a" is the house's own, "b" is beside it."""

    def __init__(self, root: Path, model: Path | None = None, *, options: tuple[str, ...] = ()) -> None:
        self.house = House(root, model, engine_options=options)
        socket = Path(self.house.engine.address.removeprefix("unix:")).with_name("b")
        self.a, self.b = self.house.engine, Service("b", "inference_svc", ENGINE_SERVICE, socket, root / "b.log")
        self.b.options = [*self.house.engine.options]
        self.b.options[self.b.options.index("--state-dir") + 1] = str(root / "state-b")
        self.link = CutLink(socket.with_name("cut"), socket)
        peers = {"b": self.b.address, "cut": self.link.address, "gone": f"unix:{socket.with_name('gone')}"}
        self.a.options += [word for name, address in peers.items() for word in ("--peer", f"{name}={address}")]
        self.b.options += ["--peer", f"a={self.a.address}"]

    def start(self) -> None:
        self.house.start()
        self.b.start()

    def close(self) -> None:
        self.link.close()
        self.b.kill()
        self.house.close()

    @contextlib.asynccontextmanager
    async def clients(self) -> Any:
        """A client of each engine; both know the other."""
        async with (
            AioInferenceClient.connect(self.a.address) as a,
            AioInferenceClient.connect(self.b.address) as b,
        ):
            a.peers["b"], b.peers["a"] = b, a
            yield a, b


@contextlib.contextmanager
def two_engines(root: Path, model: Path | None = None, *, options: tuple[str, ...] = ()) -> Iterator[TwoEngines]:
    """Both up, and gone afterwards whatever happens."""
    two = TwoEngines(root, model, options=options)
    try:
        two.start()
        yield two
    finally:
        two.close()


@dataclass
class Heard:
    """What a reader heard of a turn, and how its moves went."""

    reply: Reply = field(default_factory=Reply)
    kinds: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)  # between two deltas around a move
    moves: list[pb.Moved] = field(default_factory=list)
    not_moved: list[KvasirError] = field(default_factory=list)

    @property
    def told(self) -> tuple[object, ...]:
        """All that must not depend on where the turn ran."""
        choices = [
            (each.text, each.reasoning_text, each.token_ids, [str(one) for one in each.logprobs], _ended(each.finished))
            for each in self.reply.choices
        ]
        return self.reply.started.prompt_tokens, choices


def _ended(finished: pb.Finished) -> tuple[object, ...]:
    calls = [(call.name, call.arguments_json) for call in finished.tool_calls]  # their ids have the request's
    tokens = (finished.usage.prompt_tokens, finished.usage.completion_tokens, finished.memory_tokens)
    return finished.reason, finished.matched_stop, tokens, calls


async def hear(
    client: AioInferenceClient, moves: dict[int, tuple[AioInferenceClient, str]] | None = None, **turn: Any
) -> Heard:
    """Read a turn to its end. `moves`: by tokens heard, the engine that has the turn then and the peer that gets it.
    Each begins after the end of the one before it.
    """
    heard, moves = Heard(), dict(moves or {})
    asked: list[asyncio.Task[object]] = []
    tokens, last_s, has_moved = 0, time.monotonic(), False
    async for event in client.generate(**turn):
        kind = event.WhichOneof("event")
        heard.kinds.append(kind)
        heard.reply.add(event)
        if kind == "moved":
            heard.moves.append(event.moved)
            has_moved = True
        if kind != "delta":
            continue
        now_s = time.monotonic()
        if has_moved:
            heard.gaps_s.append(now_s - last_s)
        last_s, has_moved = now_s, False
        tokens += len(event.delta.token_ids)
        are_over = len(heard.moves) + len(heard.not_moved) == len(asked)
        for at in [at for at in moves if at <= tokens][:are_over]:
            engine, peer = moves.pop(at)
            asked.append(asyncio.create_task(_move(engine, peer, heard, heard.reply.started.request_id)))
    await asyncio.gather(*asked)
    return heard


async def hear_until_it_moved(client: AioInferenceClient, peer: str, **turn: Any) -> tuple[str, Unavailable]:
    """A turn of a reader that follows by itself, and does not: its text, and the error that tells where the rest is."""
    text, asked = "", None
    client.peers = {peer: _Nowhere()}  # type: ignore[dict-item]
    try:
        async for event in client.generate(**turn):
            text += event.delta.text
            if event.HasField("delta") and asked is None:
                asked = asyncio.create_task(client.hand_over(peer, request_id=turn["request_id"]))
    except Unavailable as error:
        assert asked is not None
        await asked
        return text, error
    raise AssertionError("it did not move")


class _Nowhere:
    """Stands for the client of an engine, and reads nothing there."""

    async def resume(self, resume_token: str, **_: Any) -> AsyncGenerator[pb.GenerateResponse, None]:
        raise Moved("b", resume_token).unknown()
        yield


async def _move(engine: AioInferenceClient, peer: str, heard: Heard, request_id: str) -> None:
    try:
        await engine.hand_over(peer, request_id=request_id)
    except KvasirError as error:
        heard.not_moved.append(error)
