"""Conversations as people look for them: by title, by day, pinned ones first, those of programs apart."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo

from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.clients import AioInferenceClient
from kvasir.errors import InvalidArgument
from kvasir.names import UNNAMED_PREFIXES

from kvasir_gateway.page.look import Answer, Handler, Look
from kvasir_gateway.page.looking import panel
from kvasir_gateway.reading.titles import TITLE

SHOWN = 50
_A_CALL, _MOST_CALLS = 1000, 5  # agents that are read, by name


class ConversationList:
    """The handlers of the list, and of what a conversation is called there."""

    def pages(self) -> Mapping[str, Handler]:
        return {"": self.overview}

    def writes(self) -> Mapping[str, Handler]:
        return {"rename": self._rename, "pin": self._pin}

    async def overview(self, look: Look) -> Answer:
        begin = look.query("begin")
        if begin and re.fullmatch("[0-9]{1,6}", begin) is None:
            raise InvalidArgument.of("begin", "expected a number")
        wanted = Search(look.query("q")[:256], int(begin or 0), look.query("of") == "programs")
        return look.shown(
            "conversations.html", listed=await panel(listed(look.client, wanted, look.now)), wanted=wanted
        )

    async def _rename(self, look: Look) -> Answer:
        name, title = look.named(), " ".join(look.form.get("title", "").split())
        await look.caller.at(name).update_agent(name, labels={TITLE: title})
        return look.goto("chat", id=name, done="rename")

    async def _pin(self, look: Look) -> Answer:
        name, is_pinned = look.named(), look.form.get("is") == "yes"
        await look.caller.at(name).update_agent(name, is_pinned=is_pinned)
        return look.goto("chat", id=name, done="pin" if is_pinned else "unpin")


@dataclass(frozen=True, slots=True)
class Talk:
    """An agent in the list. `subtitle`: its name, where the title is another."""

    agent: cachestore_pb2.Agent
    title: str
    subtitle: str
    is_hot: bool = False

    @property
    def newest(self) -> cachestore_pb2.SnapshotVersion:
        return self.agent.lines[0] if self.agent.lines else cachestore_pb2.SnapshotVersion()


@dataclass(frozen=True, slots=True)
class Listed:
    """A part of the list: its days in order, and how much there is. `programs`: agents that no caller named; those are
    the list where `is_programs`. `begin`: where the part begins; `count`: of all that were found."""

    days: Mapping[str, Sequence[Talk]]
    begin: int
    count: int
    programs: int
    is_programs: bool
    is_cut: bool

    @property
    def following(self) -> int | None:
        """Where the next part begins."""
        return self.begin + SHOWN if self.begin + SHOWN < self.count else None


@dataclass(frozen=True, slots=True)
class Search:
    """What somebody looks for."""

    words: str = ""
    begin: int = 0
    is_programs: bool = False


async def listed(client: AioInferenceClient, wanted: Search, now_s: float) -> Listed:
    """The conversations that have all the words, the last used first."""
    found, is_cut = await _found(client, wanted.words)
    programs = [each for each in found if _is_programs(each)]
    own = programs if wanted.is_programs else [each for each in found if not _is_programs(each)]
    own.sort(key=lambda each: (not each.agent.is_pinned, -each.agent.used_at.ToNanoseconds()))
    shown = own[wanted.begin : wanted.begin + SHOWN]
    hot = {each.agent_id for each in await client.list_hot_memories([talk.agent.agent_id for talk in shown])}
    days: dict[str, list[Talk]] = {}
    today = datetime.fromtimestamp(now_s, UTC).astimezone()
    for each in shown:
        day = "Pinned" if each.agent.is_pinned else day_of(each.agent.used_at.ToDatetime(tzinfo=UTC), today)
        days.setdefault(day, []).append(Talk(each.agent, each.title, each.subtitle, each.agent.agent_id in hot))
    return Listed(days, wanted.begin, len(own), len(programs), wanted.is_programs, is_cut)


def day_of(used: datetime, today: datetime) -> str:
    """Today, Yesterday, the weekday within the last week, else a month. `today`: in the time zone that days are of."""
    zone: tzinfo | None = today.tzinfo
    local = used.astimezone(zone)
    days = (today.date() - local.date()) // timedelta(days=1)
    if days < 2:
        return "Yesterday" if days == 1 else "Today"
    return f"{local:%A}" if days < 7 else f"{local:%B %Y}"


def title_of(agent: cachestore_pb2.Agent) -> str:
    """What people call it: its label, else its name; a program's conversation has no name that anybody can read."""
    if title := agent.labels.get(TITLE, ""):
        return title
    if agent.agent_id.startswith(UNNAMED_PREFIXES):
        return f"Untitled {agent.agent_id.rpartition('/')[2]}"
    return agent.agent_id


def _talk(agent: cachestore_pb2.Agent) -> Talk:
    title = title_of(agent)
    return Talk(agent, title, "" if title == agent.agent_id else agent.agent_id)


def _is_programs(talk: Talk) -> bool:
    return talk.agent.agent_id.startswith(UNNAMED_PREFIXES) and not talk.agent.is_pinned


def _has(talk: Talk, words: str) -> bool:
    text = " ".join((talk.title, talk.agent.agent_id, *talk.agent.labels.values())).casefold()
    return all(word in text for word in words.casefold().split())


async def _found(client: AioInferenceClient, words: str) -> tuple[Sequence[Talk], bool]:
    """Those of the namespace that have the words, and whether there are more than anybody reads."""
    found: list[Talk] = []
    token = ""
    for _ in range(_MOST_CALLS):
        page = await client.list_agents(page_size=_A_CALL, page_token=token)
        found += [talk for talk in map(_talk, page.agents) if _has(talk, words)]
        if not (token := page.next_page_token):
            return found, False
    return found, True
