"""A caller's agents in the store, as far as conversations need them."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

from kvasir_gateway.turn import Said

Made = TypeVar("Made")
PREFIX = "conversation/"  # of the names of agents that no caller named


@dataclass(frozen=True, slots=True)
class Kept:
    """An agent of the store, as far as conversations need it."""

    agent_id: str
    used_at: datetime
    is_copy: bool = False  # an archive or a copy of another store's brought it
    opening: str = ""  # of a compacted conversation the newest
    summary: str = ""  # that its client was given, as `compaction.Summaries` writes it
    expires: bool = False  # it has the label of the days that it may stay unused
    version: int = 0  # its newest
    is_elsewhere: bool = False  # another store owns it, or is about to


class Beside(Protocol):
    """Does work that would hold up the event loop."""

    def __call__(self, make: Callable[[], Made]) -> Awaitable[Made]: ...


class AgentRecords(Protocol):
    """What the store knows about a caller's agents."""

    async def kept(self, name_prefix: str, opening: str = "") -> list[Kept]:
        """The last used first."""

    async def note(self, agent_id: str, *, summary: str, opening: str = "") -> None:
        """Keep the summary that its client was given; "" once it is used. `opening`: the conversation's from now on."""

    async def let_expire(self, agent_id: str) -> None:
        """From now on the store deletes it once nobody has used it for a week."""

    async def messages(self, agent_id: str) -> Sequence[Said]: ...

    async def fork(self, source: str, name: str, version: int | None) -> int:
        """Returns the fork's newest version."""

    async def delete(self, agent_id: str, only_version: int | None = None) -> None:
        """`only_version`: unless its newest version is another one."""

    @property
    def beside(self) -> Beside: ...
