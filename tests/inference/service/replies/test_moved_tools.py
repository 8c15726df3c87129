"""Tools that come in another order, or with the keys of their JSON in another order, cost nothing: the memory's order
stays, and the reply is that of a conversation whose tools never moved.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from kvasir import errors
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.clients import InferenceClient, Reply
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.volatile import LABEL, TEMPLATE_DATE, TOOLS_ORDER

from tests.running.system_fixtures import House

GREEDY = {"max_tokens": 12}
SYSTEM = [{"role": "system", "content": "You look after a harbour, and you are careful. " * 8}]
QUESTIONS = ("Which ships lie at the quay?", "And which of them leave today?", "Thanks. Note it.")
NONE = pb.VolatileRules()
ALL = pb.VolatileRules(names=[TOOLS_ORDER, TEMPLATE_DATE])
PARAMETERS = {"place": {"type": "string"}, "on": {"type": "object", "properties": {"day": {}, "hour": {}}}, "most": {}}
TOOLS = [
    pb.Tool(
        name=name,
        description=f"It {name}s what is there.",
        parameters_json=json.dumps({"type": "object", "properties": PARAMETERS, "required": ["place"]}),
    )
    for name in ("look", "find", "write", "ask", "count")
]


def moved(tools: list[pb.Tool]) -> list[pb.Tool]:
    """The same in another order, and so are their keys."""
    return [
        pb.Tool(
            name=tool.name,
            description=tool.description,
            parameters_json=json.dumps(turned(json.loads(tool.parameters_json)), indent=1),
        )
        for tool in reversed(tools)
    ]


def turned(value: Any) -> Any:
    return {key: turned(value[key]) for key in reversed(value)} if isinstance(value, dict) else value


class Talk:
    """A conversation that sends itself whole, as chat APIs do."""

    def __init__(self, client: InferenceClient, agent: str) -> None:
        self._client = client
        self.agent = agent
        self._said: list[dict[str, str]] = [*SYSTEM]

    def turn(self, question: str, tools: list[pb.Tool], **more: Any) -> Reply:
        asked = [*self._said, {"role": "user", "content": question}]
        reply = self._client.reply(agent_id=self.agent, messages=asked, tools=tools, sampling=GREEDY, **more)
        self._said = [*asked, {"role": "assistant", "content": reply.text}]
        return reply

    def memory(self) -> manifest_pb2.Manifest:
        return manifest.parse(self._client.get_snapshot(self.agent)[1])


def goes_on_whole(before: Reply, reply: Reply) -> None:
    assert list(reply.started.kept) == [TOOLS_ORDER]
    assert reply.started.cached_tokens > before.finished.memory_tokens - 4  # a reply may end inside a character


@pytest.mark.long(6)
def test_turns_whose_tools_move_are_those_of_tools_that_never_did(own_house: House) -> None:
    with own_house.client() as client:
        still, moving = Talk(client, "still"), Talk(client, "moving")
        expected = [still.turn(question, TOOLS) for question in QUESTIONS]
        first = moving.turn(QUESTIONS[0], TOOLS)
        assert not first.started.kept
        second = moving.turn(QUESTIONS[1], moved(TOOLS))
        goes_on_whole(first, second)
        own_house.restart()
        third = moving.turn(QUESTIONS[2], [TOOLS[2], *moved(TOOLS[3:]), *TOOLS[:2]])
        goes_on_whole(second, third)
        assert third.started.source == pb.CACHE_SOURCE_WARM
        assert [each.token_ids for each in (first, second, third)] == [each.token_ids for each in expected]
        ours, theirs = moving.memory(), still.memory()
        assert (ours.text, ours.token_ids, ours.tools_order) == (theirs.text, theirs.token_ids, theirs.tools_order)


def test_without_the_rule_tools_are_rendered_as_they_came(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    talk = Talk(client, new_agent())
    talk.turn(QUESTIONS[0], TOOLS)
    second = talk.turn(QUESTIONS[1], moved(TOOLS), volatile=NONE)
    assert not second.started.kept
    assert second.started.match == pb.PREFIX_MATCH_DIVERGE
    assert talk.memory().text.index("count(") < talk.memory().text.index("look(")
    goes_on_whole(second, talk.turn(QUESTIONS[2], TOOLS))  # now this is the memory's order


def test_a_branch_has_the_order_too_and_other_tools_have_their_own(
    client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    talk = Talk(client, new_agent())
    talk.turn(QUESTIONS[0], TOOLS)
    beside = [*SYSTEM, {"role": "user", "content": "Of something else."}]
    branch = client.reply(agent_id=talk.agent, messages=beside, tools=moved(TOOLS), sampling=GREEDY)
    assert branch.started.continuation == pb.CONTINUATION_BRANCHED
    assert list(branch.started.kept) == [TOOLS_ORDER]
    assert branch.started.cached_tokens > 100
    fewer = talk.turn(QUESTIONS[1], moved(TOOLS[1:]))
    assert not fewer.started.kept
    assert talk.memory().text.index("count(") < talk.memory().text.index("find(")


def test_a_fork_and_a_warmed_memory_have_the_order(client: InferenceClient, new_agent: Callable[[], str]) -> None:
    talk = Talk(client, new_agent())
    first = talk.turn(QUESTIONS[0], TOOLS)
    talk.agent = client.fork_agent(talk.agent, new_agent()).agent_id
    appended = [{"role": "user", "content": QUESTIONS[1]}]
    warm = client.warm(agent_id=talk.agent, append_messages=appended, tools=moved(TOOLS))
    assert warm.cached_tokens > first.finished.memory_tokens - 4
    second = talk.turn(QUESTIONS[1], moved(TOOLS))
    assert second.started.prompt_tokens - second.started.cached_tokens == 1


def test_a_label_goes_before_defaults_and_a_turns_own_rules_before_the_label(
    house: House, client: InferenceClient, new_agent: Callable[[], str]
) -> None:
    talk = Talk(client, new_agent())
    talk.turn(QUESTIONS[0], TOOLS)
    with house.store_client() as store:
        store.update_agent(talk.agent, labels={LABEL: "none"})
        with pytest.raises(errors.InvalidArgument, match=r"labels\.kvasir\.volatile: 'clocks' is none of"):
            store.update_agent(talk.agent, labels={LABEL: "tools-order,clocks"})
    beside = {"memory_mode": pb.MEMORY_MODE_READ_ONLY}
    defaults = pb.VolatileRules(names=[TOOLS_ORDER], is_default=True)
    told = [
        talk.turn(QUESTIONS[1], moved(TOOLS), volatile=rules, **beside).started.kept for rules in (None, defaults, ALL)
    ]
    assert [list(kept) for kept in told] == [[], [], [TOOLS_ORDER]]


@pytest.mark.parametrize("name", ["clocks", "billing-line", ""])
def test_a_rule_that_is_none_is_refused_by_name(client: InferenceClient, name: str) -> None:
    rules = pb.VolatileRules(names=[TOOLS_ORDER, name])
    with pytest.raises(errors.InvalidArgument) as refused:
        client.reply(messages=[{"role": "user", "content": "Hello"}], volatile=rules, sampling=GREEDY)
    assert refused.value.field == "volatile.names[1]"
