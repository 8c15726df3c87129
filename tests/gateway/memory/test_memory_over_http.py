"""Memories behind HTTP: they outlive kill -9, are shared in one namespace alone; a reader who leaves ends a turn."""

import json
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest
from kvasir import expires_after
from kvasir.clients import Choice, Reply
from kvasir.credentials import write_credentials, write_private_text
from kvasir.errors import Cancelled, NotFound
from kvasir.formats import manifest
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway import anthropic_messages
from kvasir_gateway.openai import response_answers as openai_response_answers
from kvasir_gateway.openai import responses as openai_responses
from kvasir_gateway.turn import Asked

from tests.gateway.conftest import Front, running_front
from tests.gateway.dialects.test_openai_chat import ask, cached
from tests.gateway.serving import CALLERS, MODEL, GatewayProcess, running_gateway

SYSTEM = "You live in a small town and know everybody there. " + "The market was full of people this morning. " * 40


KEY_FILE = "conversations.key"
# The token with which the shipped model ends a reply.
END = "2"


def running_turns(front: Front) -> int:
    with front.house.client() as client:  # the owner sees all namespaces
        return sum(each.waiting_turns + each.running_turns for each in client.get_stats().namespaces)


def cancelled_turns(front: Front) -> int:
    with front.house.client() as client:
        return sum(each.turn_ends["cancelled"] for each in client.get_stats().namespaces)


def wait_until_idle(front: Front) -> None:
    wait_for_turns(front, 0)


def wait_for_turns(front: Front, count: int, within_s: float = 20) -> None:
    give_up = time.monotonic() + within_s
    while (turns := running_turns(front)) != count:
        assert time.monotonic() < give_up, f"{turns} turns run instead of {count}"
        time.sleep(0.05)


@pytest.mark.long(6)
def test_after_kill_9_of_everything_the_next_turn_is_warm(own_front: Front) -> None:
    front = own_front
    chat: list[Any] = [{"role": "user", "content": "My name is Anna."}]
    mine = front.openai()
    chat.append({"role": "assistant", "content": ask(mine, chat).choices[0].message.content})
    named = front.anthropic(**{"x-agent-id": "ada"})
    told: list[Any] = [{"role": "user", "content": "My dog is called Rex."}]
    first = named.messages.create(model=MODEL, max_tokens=16, messages=told)
    response = mine.responses.create(model=MODEL, input="My name is Anna.")
    front.gateway.kill()
    front.house.restart()
    front.gateway.start()
    answer = ask(mine, [*chat, {"role": "user", "content": "What is my name?"}])
    assert "Anna" in str(answer.choices[0].message.content)
    assert cached(answer) > 15
    told += [{"role": "assistant", "content": first.content[0].text}, {"role": "user", "content": "Hello?"}]  # type: ignore[union-attr]
    again = named.messages.create(model=MODEL, max_tokens=8, messages=told)
    assert (again.usage.cache_read_input_tokens or 0) > 15
    gone_on = mine.responses.create(model=MODEL, input="What is my name?", previous_response_id=response.id)
    assert "Anna" in gone_on.output_text
    assert gone_on.usage is not None
    assert gone_on.usage.input_tokens_details.cached_tokens > 15


@pytest.mark.long(2)
def test_a_conversation_goes_on_in_no_memory_that_came_as_a_copy(front: Front) -> None:
    """Who reads the names of agents can give one that looks like the conversation's. A restarted gateway asks the store
    which of them it was.
    """
    said: list[dict[str, Any]] = [{"role": "user", "content": "My name is Anna, and this is a copy's test."}]
    state_dir = front.house.root / "restarted"
    write_private_text(state_dir / KEY_FILE, (front.house.root / "gateway" / KEY_FILE).read_text())

    def agent_of_next(gateway: GatewayProcess) -> str:
        asked = {"model": MODEL, "messages": said, "max_tokens": 8}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", headers=front.bearer(), json=asked, timeout=60)
        said.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        said.append({"role": "user", "content": "What is my name?"})
        return answer.headers["x-agent-id"]

    own = agent_of_next(front.gateway)
    forged = f"{own.rpartition('/')[0]}/ffff"
    with front.house.store_client(front.keys["ada"]) as stranger:
        stranger.import_agent(forged, stranger.export_agent(own))
    credentials = str(front.house.root / "credentials.toml")
    with running_gateway(front.house, "--credentials", credentials, name=state_dir.name) as restarted:
        assert agent_of_next(restarted) == own
    with front.house.store_client(front.keys["ada"]) as stranger:
        stranger.delete_agent(own)
    with running_gateway(front.house, "--credentials", credentials, name=state_dir.name) as restarted:
        del said[-2:]
        assert agent_of_next(restarted) not in (own, forged)


def test_a_conversation_without_a_name_gets_a_week_by_the_stores_count(front: Front) -> None:
    def asked(gateway: GatewayProcess, text: str) -> str:
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", headers=front.bearer(), json=body, timeout=60)
        return str(answer.headers["x-agent-id"])

    name, give_up = asked(front.gateway, "My name is Anna, for a week."), time.monotonic() + 20
    credentials = str(front.house.root / "credentials.toml")
    with running_gateway(front.house, "--credentials", credentials, name="tidying") as tidying:
        asked(tidying, "Hello, tidying one.")
        with front.house.store_client(front.keys["ada"]) as store:
            while not (labels := store.get_agent(name).labels).get(expires_after.LABEL):
                assert time.monotonic() < give_up, dict(labels)
                time.sleep(0.05)
            assert labels[expires_after.LABEL] == "7d"


def test_a_system_prompts_blocks_are_shared_under_one_namespace_alone(front: Front) -> None:
    def asked(caller: str, question: str) -> int:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        return cached(ask(front.openai(caller), messages))

    assert asked("ada", "My name is Anna.") == 0
    assert asked("ada", "My dog is called Rex.") >= 256
    assert asked("bob", "Where is the market?") >= 256
    assert asked("eve", "Where is the market?") == 0


@pytest.mark.long(3)
def test_a_conversation_that_is_edited_in_its_middle_goes_on_warm_from_its_second_turn(front: Front) -> None:
    client = front.openai()
    chat: list[Any] = [{"role": "user", "content": "Edited. My name is Anna."}]
    for question in ("My dog is called Rex.", "I live in Paris.", "My friend is Bo.", "What is my name?"):
        chat += [{"role": "assistant", "content": ask(client, chat).choices[0].message.content}]
        chat += [{"role": "user", "content": question}]
    assert len(chat) == 9
    edited = [*chat[:2], {"role": "user", "content": "My cat is called Tom, and it sleeps all day long."}]
    first = ask(client, edited)
    assert cached(first) > 15
    edited += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Hm?"}]
    second = ask(client, edited)
    assert second.usage is not None
    assert second.usage.prompt_tokens - cached(second) < 20, "all but what is new"
    # What was edited goes on as well, where it was.
    last = ask(client, chat)
    assert last.usage is not None
    assert last.usage.prompt_tokens - cached(last) < 20


def test_what_becomes_of_a_named_agents_memory_is_asked_and_reported_in_a_header(front: Front, openai: Any) -> None:
    def talk(text: str, **headers: str) -> tuple[str, int]:
        client = front.openai(**{"x-agent-id": "told", **headers}).chat.completions.with_raw_response
        raw = client.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": text}])
        assert raw.headers.get("x-agent-id") in ("told", None)
        return raw.headers["x-agent-memory"], cached(raw.parse())

    def remembered() -> tuple[int, str]:
        with front.house.client(front.keys["ada"]) as client:
            snapshot, data = client.get_snapshot("told")
        return snapshot.version, manifest.parse(data).messages[0].content

    assert talk("My name is Anna.") == ("new", 0)
    assert talk("Quite another talk.")[0] == "branched"
    assert talk("My name is Anna.", **{"x-agent-memory": "read-only"})[0] == "read-only"
    assert talk("My name is Anna.", **{"x-agent-memory": "none"}) == ("none", 0)
    assert remembered() == (1, "My name is Anna.")
    assert talk("Quite another talk.", **{"x-agent-memory": "replace"})[0] == "replaced"
    assert remembered() == (2, "Quite another talk.")
    with pytest.raises(openai.BadRequestError, match="expected one of"):
        talk("?", **{"x-agent-memory": "all"})
    with pytest.raises(openai.BadRequestError, match="needs x-agent-id"):
        ask(front.openai(**{"x-agent-memory": "replace"}), [{"role": "user", "content": "?"}])
    streamed = {"model": MODEL, "max_tokens": 4, "stream": True, "messages": [{"role": "user", "content": "Streamed."}]}
    headers = {**front.bearer(), "x-agent-id": "streamed"}
    answer = httpx.post(f"{front.gateway.url}/v1/messages", json=streamed, headers=headers, timeout=30)
    assert (answer.headers["x-agent-memory"], answer.headers["x-agent-id"]) == ("new", "streamed")


def test_the_curl_of_the_readme_is_remembered(front: Front) -> None:
    page = (Path(__file__).parents[3] / "compose/README.md").read_text()
    words = shlex.split(page[page.index("curl http://127.0.0.1:8642") :].split("```")[0].replace("\\\n", " "))
    given = dict(words[at + 1].split(": ", 1) for at, word in enumerate(words) if word == "-H")
    url, body = f"{front.gateway.url}{urlsplit(words[1]).path}", words[words.index("-d") + 1]
    headers = {**given, "x-agent-id": "curled", "Authorization": front.bearer()["authorization"]}
    done = [httpx.post(url, content=body, headers=headers, timeout=30).headers["x-agent-memory"] for _ in range(2)]
    assert done == ["new", "extended"]


@pytest.mark.long(3)
def test_append_takes_only_what_follows_the_last_reply(front: Front, openai: Any) -> None:
    """Over OpenAI's and Anthropic's APIs, whether a client resends the conversation or not."""
    headers = {"x-agent-id": "appended", "x-agent-memory": "append"}
    mine = front.openai(**headers).chat.completions.with_raw_response
    system = {"role": "system", "content": "You are brief."}

    def talk(*messages: dict[str, str]) -> tuple[str, str]:
        raw = mine.create(model=MODEL, max_tokens=16, messages=[*messages])
        return raw.headers["x-agent-memory"], raw.parse().choices[0].message.content

    done, _ = talk(system, {"role": "user", "content": "My name is Anna."})
    assert done == "new"
    assert talk({"role": "user", "content": "My dog is called Rex."})[0] == "extended"
    resent = [system, {"role": "user", "content": "forgotten here"}, {"role": "assistant", "content": "and wrong"}]
    done, answer = talk(*resent, {"role": "user", "content": "What is my name?"})
    assert (done, "Anna" in answer) == ("extended", True)
    theirs = front.anthropic(**headers).messages
    dog = theirs.create(
        model=MODEL, max_tokens=16, system="Not read.", messages=[{"role": "user", "content": "What is my dog called?"}]
    )
    assert "Rex" in dog.content[0].text
    assert (dog.usage.cache_read_input_tokens or 0) > 30
    with front.house.client(front.keys["ada"]) as client:
        snapshot, data = client.get_snapshot("appended")
    said = [message.content for message in manifest.parse(data).messages if message.role != "assistant"]
    asked = ["My name is Anna.", "My dog is called Rex.", "What is my name?", "What is my dog called?"]
    assert (snapshot.version, said) == (4, ["You are brief.", *asked])
    for refused in ([system], [*resent]):
        with pytest.raises(openai.BadRequestError, match="behind the last reply"):
            talk(*refused)


def test_a_response_behind_an_append_with_instructions_loses_no_message(front: Front) -> None:
    """The agent remembers other instructions, or none: its first message is no system's."""
    name = {"x-agent-id": "appended/with instructions"}
    ask(front.openai(**name), [{"role": "user", "content": "My name is Anna."}])
    appended = front.openai(**name, **{"x-agent-memory": "append"})
    response = appended.responses.create(model=MODEL, instructions="Be brief.", input="Hello?", max_output_tokens=16)
    gone_on = front.openai().responses.create(
        model=MODEL, input="What is my name?", previous_response_id=response.id, max_output_tokens=16
    )
    assert "Anna" in gone_on.output_text


def test_a_response_behind_an_append_with_instructions_keeps_the_agents_own(front: Front) -> None:
    """They were not appended: the agent's own go on until a request brings others."""
    agent = "appended/with instructions of its own"
    client = front.openai(**{"x-agent-id": agent})
    asked: dict[str, Any] = {"model": MODEL, "max_output_tokens": 4}
    client.responses.create(**asked, instructions="You are Bob.", input="My name is Anna.")

    def goes_on(input_: str, **more: Any) -> tuple[str, str]:
        """The id of a response, and what the agent's memory begins with."""
        response = client.responses.create(**asked, input=input_, **more)
        with front.house.client(front.keys["ada"]) as engine:
            _, data = engine.get_snapshot(agent)
        return response.id, manifest.parse(data).messages[0].content

    append = {"x-agent-memory": "append"}
    appended, _ = goes_on("Hello?", instructions="Be brief.", extra_headers=append)
    assert goes_on("And now?", previous_response_id=appended)[1] == "You are Bob."
    assert goes_on("And now?", previous_response_id=appended, instructions="Be kind.")[1] == "Be kind."
    plain, _ = goes_on("And?", previous_response_id=appended, extra_headers=append)
    goes_on("And?", previous_response_id=plain, instructions="Be glad.")
    with front.house.client(front.keys["ada"]) as engine:
        said = manifest.parse(engine.get_snapshot(agent)[1]).messages
    assert [each.content for each in said if each.role == "system"] == ["Be glad."]


def test_append_gives_a_new_agent_all_messages_and_an_old_one_the_newest_without_a_store(front: Front) -> None:
    """Only the engine knows what is remembered in RAM alone."""
    client = front.openai("hot", **{"x-agent-id": "in RAM", "x-agent-memory": "append"})
    create = client.chat.completions.with_raw_response.create
    system = {"role": "system", "content": "Her dog is called Rex."}

    def talk(text: str, request_id: str = "") -> tuple[str, int]:
        messages: list[Any] = [system, {"role": "user", "content": text}]
        named = {"x-request-id": request_id} if request_id else {}
        raw = create(model=MODEL, max_tokens=4, messages=messages, extra_headers=named)
        return raw.headers["x-agent-memory"], int(raw.headers["x-kvasir-reused"].split()[2].rstrip(";"))

    alone = front.openai("hot", **{"x-agent-memory": "none"}).chat.completions
    asked: list[Any] = [system, {"role": "user", "content": "My name is Anna."}]
    prompt_tokens = alone.create(model=MODEL, max_tokens=4, messages=asked).usage.prompt_tokens
    assert talk("My name is Anna.") == ("new", prompt_tokens)
    done, tokens = talk("What is my name?")
    assert done == "extended"
    assert prompt_tokens < tokens < 2 * prompt_tokens
    done, tokens = talk("And my dog's?", "mine")
    assert done == "extended"
    assert talk("And my dog's?", "mine") == ("replayed", tokens), "a retry appends nothing twice"


def streamed_ends(front: Front) -> dict[str, list[dict[str, Any]]]:
    """A streamed turn's last events of each API, by the clients, which take no field that they cannot read."""
    spoken: Any = [{"role": "user", "content": "Hello."}]
    openai, anthropic = front.openai(is_strict=False), front.anthropic()
    asked: dict[str, Any] = {"model": MODEL, "stream": True, "extra_headers": {"x-agent-id": "eve"}}
    chat = openai.chat.completions.create(messages=spoken, max_tokens=4, **asked)
    completions = openai.completions.create(prompt="Hello.", max_tokens=4, **asked)
    responses = openai.responses.create(input="Hello.", max_output_tokens=4, **asked)
    messages = anthropic.messages.create(messages=spoken, max_tokens=4, **asked)
    return {
        "chat": [part.model_dump() for part in chat if part.choices[0].finish_reason],
        "completions": [part.model_dump() for part in completions if part.choices[0].finish_reason],
        "responses": [
            part.response.model_dump()
            for part in responses
            if part.type in ("response.completed", "response.incomplete")
        ],
        "messages": [part.model_dump() for part in messages if part.type == "message_delta"],
    }


@pytest.mark.long(4)
def test_an_answer_names_why_its_turn_is_in_ram_alone(tmp_path: Path) -> None:
    with running_front(tmp_path, store_options=("--free-disk-reserve-bytes", str(1 << 60))) as full:
        create = full.openai(**{"x-agent-id": "ada"}).chat.completions.with_raw_response.create
        raw = create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hello."}])
        why = raw.headers["x-kvasir-not-stored"]
        assert why.startswith("ResourceExhausted: disk: no room for")
        for name, ends in streamed_ends(full).items():
            assert [end.get("kvasir_not_stored", "")[:28] for end in ends] == [why[:28]], name


@pytest.mark.long(2)
def test_an_id_names_its_own_reply_whatever_stands_in_its_place_now(front: Front) -> None:
    client = front.openai().responses
    first = client.create(model=MODEL, input="Placed. My name is Anna.", max_output_tokens=8)
    raw = client.with_raw_response.create(
        model=MODEL, input="My dog is called Rex.", previous_response_id=first.id, max_output_tokens=8
    )
    agent, second = raw.headers["x-agent-id"], raw.parse()
    with front.house.client(front.keys["ada"]) as engine:
        engine.rollback_agent(agent, 1)
        engine.reply(agent_id=agent, append_messages=[{"role": "user", "content": "My cat is called Tom."}])
        items: Any = [
            {"type": "item_reference", "id": first.output[0].id},
            *[{"type": "item_reference", "id": second.output[0].id}] * 20,
            {"role": "user", "content": "And now?"},
        ]
        gone_on = client.with_raw_response.create(model=MODEL, input=items, previous_response_id=second.id)
        _, data = engine.get_snapshot(gone_on.headers["x-agent-id"])
        said = [message.content for message in manifest.parse(data).messages]
    asked = ["Placed. My name is Anna.", first.output_text, "My dog is called Rex.", second.output_text]
    assert said[:4] == asked
    assert said[4:25] == [first.output_text, *[second.output_text] * 20]


def test_a_reader_who_leaves_ends_the_turn(front: Front) -> None:
    """It is counted as cancelled: on a busy machine, how long it went on would tell nothing."""
    wait_until_idle(front)
    before = cancelled_turns(front)
    endless = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 7000, "logit_bias": {END: -100}}
    with httpx.Client(base_url=front.gateway.url, headers=front.bearer(), timeout=30) as client:
        with client.stream("POST", "/v1/completions", json={**endless, "stream": True}) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))  # let go, they close the answer
            first = next(lines)
            assert '"choices"' in first, first
            wait_for_turns(front, 1)
        wait_until_idle(front)
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=endless, timeout=1.5)
    wait_until_idle(front)
    assert cancelled_turns(front) == before + 2


@pytest.mark.long(4)
def test_an_interrupted_turn_is_no_reason_to_compute_its_prompt_again(front: Front) -> None:
    """As in an agent whose user stops a reply and goes on: in its one memory, also behind a restart of the gateway."""
    one = front.house.root / "one-namespace.toml"
    write_credentials(one, CALLERS[:1], lambda: front.keys["ada"])
    lines = "And what is in that line? " * 100
    said: list[dict[str, Any]] = [{"role": "user", "content": f"Interrupted. My name is Anna. {lines}"}]
    endless = {"model": MODEL, "max_tokens": 2000, "logit_bias": {END: -100}, "stream": True}
    agents = set()

    def goes_on(gateway: GatewayProcess) -> None:
        body = {"model": MODEL, "messages": said, "max_tokens": 4}
        answer = httpx.post(f"{gateway.url}/v1/chat/completions", headers=front.bearer(), json=body, timeout=60)
        said.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        agents.add(answer.headers["x-agent-id"])
        used = answer.json()["usage"]
        assert used["prompt_tokens"] - used["prompt_tokens_details"]["cached_tokens"] < 60 < used["prompt_tokens"]

    def is_interrupted(gateway: GatewayProcess) -> str:
        body = {**endless, "messages": said}
        with httpx.stream(
            "POST", f"{gateway.url}/v1/chat/completions", headers=front.bearer(), json=body, timeout=60
        ) as answer:
            chunks = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
            text = next(filter(None, (chunk["choices"][0]["delta"].get("content") for chunk in chunks)))
            time.sleep(0.2)  # the model goes on: its reader has less than it remembers
        wait_until_idle(front)
        return text

    options = ("--credentials", str(one))
    with running_gateway(front.house, *options, name="one") as gateway:
        is_interrupted(gateway)
        is_interrupted(gateway)  # the same question again
        said += [{"role": "assistant", "content": is_interrupted(gateway)}, {"role": "user", "content": "Go on."}]
        goes_on(gateway)
        said.append({"role": "user", "content": f"What is in this file? {lines}"})
        said += [{"role": "assistant", "content": is_interrupted(gateway)}, {"role": "user", "content": "Stop."}]
        goes_on(gateway)
        said.append({"role": "user", "content": f"And what is in this file? {lines}"})
        said += [{"role": "assistant", "content": is_interrupted(gateway)}, {"role": "user", "content": "Stop now."}]
    with running_gateway(front.house, *options, name="one") as gateway:
        goes_on(gateway)
    assert len(agents) == 1
    with front.house.client(front.keys["ada"]) as client:
        agent, *others = client.list_agents(name_prefix=f"{agents.pop().rpartition('/')[0]}/").agents
    assert (agent.labels["title"][:12], others) == ("Interrupted.", [])


def test_a_fork_that_was_made_for_a_refused_turn_is_deleted(front: Front, openai: Any) -> None:
    """The conversation went on from an older point, so its turn got a fork."""
    client = front.openai()
    chat: list[Any] = [{"role": "user", "content": "My name is Fork."}]
    first = {"role": "assistant", "content": ask(client, chat).choices[0].message.content}
    ask(client, [*chat, first, {"role": "user", "content": "One way."}])
    with front.house.client(front.keys["ada"]) as engine:

        def names() -> set[str]:
            return {agent.agent_id for agent in engine.list_agents(name_prefix="conversation/", page_size=1000).agents}

        before = names()
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            ask(client, [*chat, first, {"role": "user", "content": "Another way."}], logit_bias={"99999999": 1})
        give_up = time.monotonic() + 60
        while names() != before:
            assert time.monotonic() < give_up, "the fork stays"
            time.sleep(0.05)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_turn_that_is_cancelled_elsewhere_does_not_look_whole(front: Front, path: str) -> None:
    given = {"prompt": "A story."} if path == "completions" else {"messages": [{"role": "user", "content": "A story."}]}
    body = {"model": MODEL, **given, "max_tokens": 7000, "logit_bias": {END: -100}, "stream": True}
    headers = {**front.bearer(), "x-request-id": f"stopped {path}"}
    with (
        httpx.stream("POST", f"{front.gateway.url}/v1/{path}", json=body, headers=headers, timeout=30) as answer,
        front.house.client(front.keys["bob"]) as other,
        front.house.client(front.keys["eve"]) as stranger,
    ):
        with pytest.raises(NotFound):
            stranger.cancel_turn(f"stopped {path}")
        other.cancel_turn(f"stopped {path}", timeout_s=20)
        *_, last = (line for line in answer.iter_lines() if line.startswith("data: "))
    assert "cancelled by another call" in last


@pytest.mark.parametrize("ending", [anthropic_messages.whole, openai_response_answers.whole])
def test_what_is_left_of_a_cancelled_turn_is_no_answer(ending: Callable[..., Any]) -> None:
    reply = Reply(choices=[Choice("Once", finished=pb.Finished(reason=pb.FINISH_REASON_CANCELLED))])
    asked = Asked(request_id="r", created=0, model=MODEL)
    more: dict[str, Any] = {"seals": None, "shows_thinking": True}
    if ending is openai_response_answers.whole:
        more = {"request": openai_responses.ResponsesRequest(model=MODEL, input="?")}
    with pytest.raises(Cancelled):
        ending(asked, reply, **more)


@pytest.mark.long(3)
def test_many_streams_at_once_end_well_and_many_that_are_left_leave_nothing(front: Front) -> None:
    """A sample of `make bench-http`."""
    body = {"model": MODEL, "max_tokens": 6, "stream": True}

    def stream(number: int) -> str:
        asked = {**body, "messages": [{"role": "user", "content": f"Stream {number}: hello."}]}
        with httpx.stream(
            "POST", f"{front.gateway.url}/v1/chat/completions", json=asked, headers=front.bearer(), timeout=60
        ) as answer:
            assert answer.status_code == 200
            if number % 2:
                return "left"
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert "error" not in "".join(lines)
        return lines[-1]

    with ThreadPoolExecutor(12) as readers:
        ended = list(readers.map(stream, range(24)))
    assert set(ended) == {"left", "data: [DONE]"}
    wait_until_idle(front)


@pytest.mark.long(5)
def test_a_stopped_engine_is_not_well_and_reports_it(own_front: Front) -> None:
    front = own_front
    assert httpx.get(f"{front.gateway.url}/healthz").status_code == 200
    front.house.store.freeze()
    give_up = time.monotonic() + 20
    while (answer := httpx.get(f"{front.gateway.url}/healthz", timeout=60)).status_code == 200:
        assert time.monotonic() < give_up, "a store that answered a moment ago is busy, and not for ever"
        time.sleep(0.05)
    assert (answer.status_code, answer.json()["store"]) == (503, False)
    front.house.store.thaw()
    front.house.engine.kill()
    answer = httpx.get(f"{front.gateway.url}/healthz", timeout=60)
    assert (answer.status_code, answer.json()["engine"]) == (503, False)
    refused = httpx.post(
        f"{front.gateway.url}/v1/messages",
        json={"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "?"}]},
        headers=front.bearer(),
        timeout=30,
    )
    assert refused.status_code == 529
    assert refused.json()["error"]["type"] == "overloaded_error"
