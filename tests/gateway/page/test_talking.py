"""Conversations in the operator's page: turns as streams, branches, forks, titles; before real services, no browser."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from kvasir.clients import InferenceClient

from tests.gateway.conftest import Front
from tests.gateway.page.html_page import Browser, Html
from tests.gateway.page.lives import MARKUP, endless_turn

SCRIPT = {"accept": "text/event-stream"}
TOLD = ("My name is Anna.", "My dog is called Rex.", "What is my name?")


@pytest.fixture
def ada(front: Front) -> Browser:
    browser = Browser(front.gateway.url)
    browser.sign_in(front.keys["ada"])
    return browser


@pytest.fixture
def client(front: Front) -> Iterator[InferenceClient]:
    with front.house.client(front.keys["ada"]) as client:
        yield client


def texts(page: Html) -> list[str]:
    """What was said, in order."""
    return [each.text for each in page.all("p", **{"class": "text"}) if not any(map(each.is_in, page.all("template")))]


def remembered(client: InferenceClient, agent: str, *told: str) -> list[str]:
    """What an agent says to these messages when nobody uses the page."""
    replies = [
        client.reply(
            agent_id=agent,
            append_messages=[{"role": "user", "content": text}],
            sampling={"max_tokens": 40, "temperature": 0},
        ).text
        for text in told
    ]
    return [each for pair in zip(told, replies, strict=True) for each in pair]


def events(browser: Browser, page: Html, status: int = 200, /, **filled: str) -> list[tuple[str, dict[str, object]]]:
    """Say something as the page's script does; the events of the answer."""
    fields = {**page.fields(page.form("say")), **filled}
    answer = browser.post("say", fields, origin=browser.url, **SCRIPT)
    assert answer.status_code == status, answer.text
    return [(name, json.loads(data)) for name, data in re.findall("event: (.*)\ndata: (.*)\n\n", answer.text)]


def notes(told: list[tuple[str, dict[str, object]]]) -> str:
    return str(told[-1][1]["notes"])


def test_a_new_conversation_has_its_first_words_as_title_and_goes_on_without_scripts(ada: Browser) -> None:
    page = ada.send(ada.get("chat"), "say", text="My name is Anna.")
    assert page.all("h1")[0].text == "My name is Anna."
    page = ada.send(page, "say", text="What is my name?")
    assert texts(page) == ["My name is Anna.", "I will remember that.", "What is my name?", "Your name is Anna."]
    assert "My name is Anna." in [each.text for each in ada.get("", q="anna").all("a", **{"class": "name"})]


def test_a_name_and_instructions_are_those_of_the_new_agent(ada: Browser, client: InferenceClient) -> None:
    page = ada.send(ada.get("chat"), "say", name="talk/named", system="Be brief.", text="My name is Bo.")
    assert page.all("h1")[0].text == "talk/named"
    assert texts(page)[:2] == ["Be brief.", "My name is Bo."]
    whole = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "My name is Bo."}]
    assert client.reply(messages=whole, sampling={"max_tokens": 40, "temperature": 0}).text == texts(page)[2]
    new = ada.get("chat")
    assert "talk/named" in ada.send(new, "say", 409, name="talk/named", text="Another.").text


def test_a_reply_comes_as_a_stream_and_reports_its_reuse(ada: Browser) -> None:
    told = events(ada, ada.get("chat"), name="talk/streamed", text="My dog is called Rex.")
    assert told[0] == ("begun", {"id": "talk/streamed"})
    assert "".join(str(value["text"]) for name, value in told if name == "delta") == "I will remember that."
    assert "0 of " in notes(told)
    assert "version 1" in notes(told)
    told = events(ada, ada.get("chat", id="talk/streamed"), text="What is my dog called?")
    assert "".join(str(value["text"]) for name, value in told if name == "delta") == "Your dog is called Rex."
    assert re.search(r"[1-9]\d* of \d+ tokens from memory \(hot", notes(told))
    assert told[-1][1]["head"] == 2


def test_the_script_is_given_the_messages_that_it_lacks_and_the_facts(ada: Browser, client: InferenceClient) -> None:
    said = remembered(client, "talk/parts", *TOLD[:2])
    assert texts(ada.get("said", id="talk/parts", after="2")) == said[2:]
    assert "8,192 tokens" in " ".join(ada.get("facts", id="talk/parts").elements[1].text.split())


def test_an_edited_message_begins_a_branch_equal_to_one_that_was_always_so(
    ada: Browser, client: InferenceClient
) -> None:
    said = remembered(client, "talk/edited", *TOLD)
    same = remembered(client, "talk/always", TOLD[0], "My dog is called Luna.", "What is my dog called?")
    edit = next(each for each in ada.get("chat", id="talk/edited").all("a") if each.text == "Edit message 3")
    page = ada.get(edit.attributes["href"])
    assert page.fields(page.form("say"))["text"] == TOLD[1]
    assert texts(page) == said[:2]
    page = ada.send(page, "say", text="My dog is called Luna.")
    assert texts(page) == same[:4]
    assert texts(ada.send(page, "say", text="What is my dog called?")) == same
    # The other branch is a version still.
    lines = ada.get("agent", id="talk/edited")
    reads = [each.attributes["href"] for each in lines.all("a") if each.text.startswith("Read")]
    assert texts(ada.get(reads[2])) == said


def test_the_first_message_can_be_edited_too(ada: Browser, client: InferenceClient) -> None:
    remembered(client, "talk/first edited", *TOLD[:2])
    page = ada.get("chat", id="talk/first edited", keep="0", edit="1")
    page = ada.send(page, "say", text="My name is Bo.")
    assert texts(page)[0] == "My name is Bo."
    assert len(texts(page)) == 2


def test_a_message_to_an_older_version_goes_on_from_it(ada: Browser, client: InferenceClient) -> None:
    said = remembered(client, "talk/older", *TOLD)
    lines = ada.get("agent", id="talk/older")
    oldest = [each.attributes["href"] for each in lines.all("a") if each.text.startswith("Read")][-1]
    page = ada.get(oldest)
    assert "as a branch" in page.text
    page = ada.send(page, "say", text="What is my dog called?")
    assert texts(page)[:3] == [*said[:2], "What is my dog called?"]
    assert "Rex" not in page.text
    edited = ada.send(ada.get(f"{oldest}&keep=0&edit=1"), "say", text="My name is Cy.")
    assert texts(edited)[0] == "My name is Cy."


@pytest.mark.long(4)
@pytest.mark.parametrize("replies", [1, 2, 3])
def test_a_fork_from_a_reply_remembers_until_there_and_leaves_the_other_as_it_is(
    ada: Browser, client: InferenceClient, replies: int
) -> None:
    name = f"talk/forked {replies}"
    said = remembered(client, name, *TOLD)
    same = remembered(client, f"{name} always", *TOLD[:replies], "What is my dog called?")
    page = ada.get("chat", id=name)
    forks = [each for each in page.all("form") if each.attributes["action"].endswith("/branch")]
    answer = ada.post("branch", page.fields(forks[replies - 1]), origin=ada.url)
    fork = ada.get(answer.headers["location"])
    assert fork.all("h1")[0].text == f"{name}-2"
    assert texts(fork) == said[: 2 * replies]
    assert texts(ada.send(fork, "say", text="What is my dog called?")) == same
    assert texts(ada.get("chat", id=name)) == said
    again = ada.post("branch", page.fields(forks[0]), origin=ada.url)
    assert f"{name}-3".replace(" ", "+").replace("/", "%2F") in again.headers["location"]


def test_a_fork_from_a_reply_whose_version_is_gone_goes_back_to_it(ada: Browser, client: InferenceClient) -> None:
    said = remembered(client, "talk/long", *TOLD, "Hello.", "Who am I?")
    client.update_agent("talk/long", retained_versions=1)
    said += remembered(client, "talk/long", "What is my dog called?")
    page = ada.get("chat", id="talk/long")
    fork = next(each for each in page.all("form") if each.attributes["action"].endswith("/branch"))
    fork_page = ada.get(ada.post("branch", page.fields(fork), origin=ada.url).headers["location"])
    assert texts(fork_page) == said[:2]
    assert texts(ada.send(fork_page, "say", text="What is my dog called?"))[:3] == [*said[:2], "What is my dog called?"]


def test_nobody_talks_over_a_turn_that_the_page_has_not_seen(ada: Browser, client: InferenceClient) -> None:
    remembered(client, "talk/over", TOLD[0])
    page = ada.get("chat", id="talk/over")
    remembered(client, "talk/over", TOLD[1])
    [(name, value)] = events(ada, page, 409, text="What is my name?")
    assert (name, list(value)) == ("refused", ["problem"])
    assert len(texts(ada.get("chat", id="talk/over"))) == 4


def test_a_message_sent_again_under_the_same_request_is_done_once(ada: Browser) -> None:
    page = ada.get("chat")
    filled = {"name": "talk/twice", "text": "My name is Anna.", "request_id": "once-and-again"}
    first = events(ada, page, **filled)
    again = events(ada, page, **filled)
    said = ["".join(str(value.get("text", "")) for _, value in told) for told in (first, again)]
    assert said[0] == said[1]
    assert "replay" in notes(again)
    assert len(texts(ada.get("chat", id="talk/twice"))) == 2


def test_a_turn_that_is_stopped_ends_at_once_and_can_be_sent_again(front: Front, ada: Browser) -> None:
    page = ada.get("chat")
    fields = {**page.fields(page.form("say")), "name": "page/endless", "text": "Hello.", "request_id": "to be stopped"}
    token = {"form_token": fields["form_token"], "request_id": "to be stopped"}
    with endless_turn(front, "before the stopped"), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ada.post, "say", fields, origin=ada.url, **SCRIPT)
        while ada.post("cancel", token, origin=ada.url, **SCRIPT).status_code != 204:
            assert not answer.done(), answer.result().text
        assert "cancelled" in answer.result(20).text


def test_titles_are_given_and_taken_and_hostile_ones_stay_text(ada: Browser, client: InferenceClient) -> None:
    remembered(client, "talk/titled", TOLD[0])
    page = ada.send(ada.get("chat", id="talk/titled"), "rename", title=f"  {MARKUP}  ")
    assert page.all("h1")[0].text == MARKUP
    assert client.get_agent("talk/titled").labels["title"] == MARKUP
    assert MARKUP in [each.text for each in ada.get("", q="onerror").all("a", **{"class": "name"})]
    assert ada.send(page, "rename", title="").all("h1")[0].text == "talk/titled"
    page = ada.send(page, "pin")
    assert ada.get("", q="talk/titled").all("section")[0].text.split()[0] == "Pinned"
    assert ada.send(page, "pin").all("button", **{"class": "quiet"})
    assert ada.get("", q="talk/titled").all("section")[0].text.split()[0] == "Today"


@pytest.mark.parametrize(
    ("field", "value"),
    [("text", " \n"), ("keep", "-1"), ("keep", "x"), ("head", "1e3"), ("version", "latest"), ("request_id", "é")],
)
def test_each_wrong_field_is_named(ada: Browser, field: str, value: str) -> None:
    page = ada.get("chat")
    [(_, told)] = events(ada, page, 400, **{"text": "Hello.", "name": "talk/wrong", field: value})
    assert str(told["problem"]).startswith(f"{field}: ")


def test_a_message_that_is_not_there_cannot_be_edited(ada: Browser, client: InferenceClient) -> None:
    remembered(client, "talk/short", TOLD[0])
    assert "no message" in ada.get("chat", 404, id="talk/short", keep="9", edit="1").text
    assert ada.get("chat", 404, id="talk/nobody").all("p", role="alert")


def test_a_script_without_a_session_is_refused_in_words(ada: Browser) -> None:
    page = ada.get("chat")
    ada.send(ada.get(), "logout", 401)
    [(name, told)] = events(ada, page, 401, text="Hello.")
    assert (name, told["problem"]) == ("refused", "the session has ended: reload, and sign in")
