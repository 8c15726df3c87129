"""One agent of the page: where its memory lies, its history, and what may be done with it."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from urllib.parse import quote

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.errors import InvalidArgument, KvasirError
from kvasir.names import check_agent_id
from starlette.responses import StreamingResponse

from kvasir_gateway.answering import unless_left
from kvasir_gateway.page import looking
from kvasir_gateway.page.look import Answer, Handler, Look, version_of
from kvasir_gateway.page.numbers.history import History
from kvasir_gateway.page.rendering import HEADERS, size
from kvasir_gateway.turn import sse


class Managing:
    """The handlers of an agent's own page."""

    def __init__(self, history: History) -> None:
        self._history = history

    def pages(self) -> Mapping[str, Handler]:
        return {"agent": self._agent, "export": self._export}

    def writes(self) -> Mapping[str, Handler]:
        return {
            "fork": self._fork,
            "rollback": self._rollback,
            "delete": self._delete,
            "label": self._label,
            "move": self._move,
        }

    async def _agent(self, look: Look) -> Answer:
        name = check_agent_id(look.query("id"), "id")
        seen = await looking.agent(look.caller, name, look.query("page_token"))
        turns = self._history.turns_of(look.namespace, name)
        return look.shown("agent.html", seen=seen, turns=turns, paged=bool(look.query("page_token")))

    async def _export(self, look: Look) -> Answer:
        """The archive of a version as a file; a refusal comes before its first piece."""
        name = check_agent_id(look.query("id"), "id")
        line, version = version_of(look.query("version"))
        pieces = look.caller.at(name).export_agent(name, line, version)
        first = await unless_left(look.request.receive, anext(pieces))

        async def archive() -> AsyncIterator[bytes]:
            async with aclosing(pieces):
                yield first
                async for piece in pieces:
                    yield piece

        file = quote(f"{name.replace('/', '-')}-{version}.kva", safe="")
        kind = {
            "content-type": "application/octet-stream",
            "content-disposition": f"attachment; filename*=UTF-8''{file}",
        }
        return StreamingResponse(archive(), headers={**HEADERS, **kind})

    async def _fork(self, look: Look) -> Answer:
        name = check_agent_id(look.form.get("name", ""), "name")
        line, version = version_of(look.form.get("version", ""))
        await look.caller.at(look.named()).fork_agent(look.named(), name, line, version)
        return look.goto("agent", id=name, done="fork")

    async def _rollback(self, look: Look) -> Answer:
        line, version = version_of(look.form.get("version", ""))
        _, head = version_of(look.form.get("head", ""))
        await look.caller.at(look.named()).rollback_agent(look.named(), version, line, expected_version=head)
        return look.goto("agent", id=look.named(), done="rollback")

    async def _label(self, look: Look) -> Answer:
        name = look.form.get("label", "").strip()
        if not name:
            raise InvalidArgument.of("label", "expected a name")
        await look.caller.at(look.named()).update_agent(look.named(), labels={name: look.form.get("value", "").strip()})
        return look.goto("agent", id=look.named(), done="label")

    async def _move(self, look: Look) -> Answer:
        """An agent goes to a peer of the store: for a script with progress, else its page once it is there."""
        peer = look.form.get("peer", "").strip()
        if not peer:
            raise InvalidArgument.of("peer", "expected the name of a peer")
        steps = look.caller.at(look.named()).moving_agent(look.named(), to_peer=peer)
        if look.is_scripts:
            return StreamingResponse(_progress(steps, peer), headers={**HEADERS, "content-type": "text/event-stream"})
        async with aclosing(steps):
            async for _ in steps:
                pass
        return look.goto("agent", id=look.named(), done="move")

    async def _delete(self, look: Look) -> Answer:
        if look.form.get("typed") != look.named():
            raise InvalidArgument.of("typed", "expected the agent's name, letter by letter; nothing was deleted")
        await look.caller.at(look.named()).delete_agent(look.named(), force="force" in look.form)
        return look.goto(done="delete")


async def _progress(steps: AsyncIterator[cachestore_pb2.MoveAgentResponse], peer: str) -> AsyncIterator[str]:
    """What a script shows of a move. One that is cut goes on when it is requested again."""
    try:
        async for step in steps:
            match step.WhichOneof("event"):
                case "progress":
                    done, total = step.progress.bytes_done, step.progress.bytes_total
                    yield sse({"done": done, "total": total, "words": f"{size(done)} of {size(total)}"}, "moving")
                case "waiting":
                    yield sse({"words": "an engine is in its turn; its end is waited for"}, "moving")
                case "done":
                    yield sse({"words": f"It has moved to {peer}."}, "moved")
    except KvasirError as error:
        yield sse({"problem": error.message}, "refused")
