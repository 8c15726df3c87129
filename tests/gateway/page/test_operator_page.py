"""The operator's page over HTTP, before real services, as a browser without scripts uses it."""

import contextlib
import re
import threading
import time
import types
from collections.abc import Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.clients import Lineage

from tests.gateway.conftest import ORIGIN, Front
from tests.gateway.page.html_page import HTML, Browser, Html, parsed
from tests.gateway.page.lives import BRANCHED, HOSTILE, MARKUP, endless_turn, live
from tests.gateway.serving import GatewayProcess
from tests.made_models.synthetic import SMALL, SyntheticAgent

WRITES = {
    "say": {"id": BRANCHED, "text": "Hello.", "head": "", "version": ""},
    "branch": {"id": BRANCHED, "keep": "2"},
    "rename": {"id": BRANCHED, "title": "Stolen"},
    "pin": {"id": BRANCHED, "is": "yes"},
    "label": {"id": BRANCHED, "label": "team", "value": "thieves"},
    "move": {"id": BRANCHED, "peer": "thief"},
    "unload": {},
    "cancel": {"request_id": "story"},
    "fork": {"id": BRANCHED, "name": "page/stolen"},
    "rollback": {"id": BRANCHED},
    "delete": {"id": BRANCHED, "typed": BRANCHED},
    "token-new": {"name": "thief", "namespace": "first", "role": "client"},
    "token-rm": {"name": "bob"},
    "pair": {"gives": "claim", "takes": "move"},
    "unpair": {"peer": "laptop"},
    "fetch": {"model": "thief/model"},
    "backup": {},
    "job-stop": {"kind": "pair"},
    "logout": {},
}


@pytest.fixture(scope="session")
def lived(front: Front) -> Front:
    """The shared house, with the agents of `lives`: made once, also if another file's tests come between this one's."""
    with front.house.client(front.keys["ada"]) as client:
        live(client)
    return front


@contextlib.contextmanager
def listener() -> Iterator[tuple[int, list[Message]]]:
    """Another program's port of this host, and the headers that it is sent."""
    seen: list[Message] = []

    class Listening(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers)
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with HTTPServer(("127.0.0.1", 0), Listening) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_port, seen
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def ada(lived: Front) -> Browser:
    browser = Browser(lived.gateway.url)
    browser.sign_in(lived.keys["ada"])
    return browser


@pytest.fixture
def eve(lived: Front) -> Browser:
    browser = Browser(lived.gateway.url)
    browser.sign_in(lived.keys["eve"])
    return browser


def version(page: Html, number: int) -> str:
    """A version of the agent's page, as its forms name it."""
    return next(each.attributes["value"] for each in page.all("option") if each.text == str(number))


def test_whoever_shows_no_key_sees_a_form_and_nothing_else(lived: Front) -> None:
    for path in ("/", "/page/turns", "/page/agent?id=page/ada", "/page/chat?id=page/ada"):
        page = Browser(lived.gateway.url).get(path, 401)
        assert [each.attributes["action"] for each in page.all("form")] == ["/page/login"]
        assert "page/" not in page.text


def test_a_key_opens_a_session_that_a_script_cannot_read_and_that_ends(lived: Front) -> None:
    browser = Browser(lived.gateway.url)
    lobby = browser.get("/", 401)
    assert "not known" in browser.send(lobby, "login", 401, key="no key at all").text
    browser.send(lobby, "login", 403, key=lived.keys["ada"], form_token="another")
    form = {**lobby.fields(lobby.form("login")), "key": lived.keys["ada"]}
    opened = httpx.post(f"{lived.gateway.url}/page/login", data=form, headers={"origin": lived.gateway.url})
    cookie = opened.headers["set-cookie"].lower()
    assert opened.status_code == 303
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert lived.keys["ada"] not in cookie
    page = browser.sign_in(lived.keys["ada"])
    assert "first" in page.text
    jar = browser.cookies
    browser.send(page, "logout", 401)
    assert httpx.get(browser.overview, cookies=jar, headers=HTML).status_code == 401
    assert lived.keys["ada"] not in lived.gateway.log


def test_another_port_of_the_host_is_sent_no_cookie_of_the_page(ada: Browser) -> None:
    with listener() as (port, seen):
        for path in ("", "page/", "page/agent", "page/another/agent"):
            ada._client.get(f"http://127.0.0.1:{port}/{path}").raise_for_status()
    assert [headers["cookie"] for headers in seen] == [None] * 4
    assert "first" in ada.get().text


def test_a_cookie_that_another_port_of_the_host_set_ends_no_session(ada: Browser) -> None:
    """Browsers keep one jar for all ports, and send cookies of longer paths first."""
    [(name, value)] = ada.cookies.items()
    for others in ("kvasir_page=x", 'kvasir_page="', f"{name.rpartition('_')[0]}_=x"):
        answer = httpx.get(ada.overview, headers={**HTML, "cookie": f"{name}={value}; {others}"})
        assert answer.status_code == 200
    assert ada.overview.split("/")[-2] not in name


@pytest.mark.parametrize(
    ("site", "status"), [("same-site", 403), ("cross-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_nobody_is_led_by_a_link_into_a_session_that_may_be_anothers(ada: Browser, site: str, status: int) -> None:
    answer = ada._client.get(ada.overview, headers={"sec-fetch-site": site})
    assert answer.status_code == status
    assert ("page/ada" in answer.text) == (status == 200)


def test_a_thief_with_the_cookie_alone_gets_neither_a_page_nor_a_write(lived: Front, ada: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    form = {"version": version(page, 1), "head": version(page, 6)}
    with httpx.Client(base_url=ada.url, cookies=ada.cookies, headers={**HTML, "origin": ada.url}) as thief:
        lobby = parsed(thief.get("/").text)
        tokens = [lobby.all("input", name="form_token")[0].attributes["value"], "", *ada.cookies.values()]
        for place in ("/", "/page/", "/page/guessed/", f"/page/{next(iter(ada.cookies.values()))}/"):
            for name in ("", "turns", f"agent?id={BRANCHED}"):
                answer = thief.get(place + name)
                assert answer.status_code in (401, 404)
                assert "page/ada" not in answer.text
            for name, fields in WRITES.items():
                for token in tokens:
                    answer = thief.post(place + name, data={**form, **fields, "form_token": token})
                    assert answer.status_code in (401, 404)
    assert version(ada.get("agent", id=BRANCHED), 6) == form["head"]


def titles(page: Html) -> list[str]:
    return [each.text for each in page.all("a", **{"class": "name"})]


def test_conversations_are_found_by_words_of_their_titles_names_and_labels(ada: Browser) -> None:
    assert titles(ada.get("", q="page/ADA")) == ["page/ada, as of the branch", BRANCHED]
    assert titles(ada.get("", q="kennel")) == ["page/ada, as of the branch"]
    assert "Nothing has these words" in ada.get("", q="ada nobody").text
    assert "begin" in ada.get("", 400, begin="?").text
    pinned, today = ada.get("", q="page/ada").all("section")
    assert pinned.text.split()[:2] == ["Pinned", "page/ada,"]
    assert today.text.split()[:2] == ["Today", "page/ada"]
    assert "kvasir-tiny" in ada.get("status").text


def test_conversations_of_programs_are_listed_apart_by_their_first_words(lived: Front, ada: Browser) -> None:
    messages = [{"role": "user", "content": "<system-reminder>Today.</system-reminder>\nWho sits\napart?"}]
    first = lived.openai().chat.completions.create(model="kvasir-tiny", messages=messages, max_completion_tokens=8)
    while "Who sits apart?" not in titles(ada.get("", of="programs")):
        time.sleep(0.05)  # no turn waits for its title
    messages += [{"role": "assistant", "content": str(first.choices[0].message.content)}]
    messages += [{"role": "user", "content": "And who else?"}]
    lived.openai().chat.completions.create(model="kvasir-tiny", messages=messages, max_completion_tokens=8)
    assert titles(ada.get("", of="programs", q="who")) == ["Who sits apart?"]
    assert "Who sits apart?" not in titles(ada.get())


def test_the_history_is_a_tree_of_versions_with_their_bases(ada: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    [table] = page.all("table", **{"class": "tree"})
    lines = page.inside(table, "tr")[1:]
    told = [(page.inside(line, "th")[0].text.split()[0], page.inside(line, "td")[2].text) for line in lines]
    assert [(version, " ".join(base.split())) for version, base in told] == [
        ("6", "version 5"),
        ("5", "version 3 rollback"),
        ("4", "version 1 branch"),
        ("3", "version 2"),
        ("2", "version 1"),
        ("1", "nothing: the first"),
    ]
    assert len(page.inside(table, "svg")) == 6
    said = [page.inside(line, "td")[1].text for line in lines]
    assert said[2:] == ["What is my dog called?", "What is my name?", "My dog is called Rex.", "My name is Anna."]
    fork = ada.get("agent", id="page/ada, as of the branch")
    assert "fork of page/ada, version 4" in fork.text
    assert "<b>kennel</b>" in [each.text for each in fork.all("dd")]
    assert re.search(r"Shared with other agents\s*[1-9]", fork.text)


def test_the_history_names_the_peer_that_handed_a_turn_over(lived: Front, ada: Browser) -> None:
    agent, turn = "page/handed over", SyntheticAgent(SMALL, 1).turn(30)
    with lived.house.store_client(lived.keys["engine-first"]) as store:
        store.put_blobs(turn.new_blobs)
        store.put_manifest(turn.manifest_bytes)
        store.commit(agent, turn.manifest_digest, 0, lineage=Lineage(handed_over_by="laptop"))
        assert "nothing: the first, handed over by laptop" in " ".join(ada.get("agent", id=agent).text.split())
        store.delete_agent(agent)


def test_messages_are_shown_when_they_are_requested_and_not_before(ada: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    rows = [row for row in ada.get("", q=BRANCHED).all("li") if BRANCHED in row.text]
    assert rows
    assert not [row for row in rows if "Anna" in row.text]
    reads = [each.attributes["href"] for each in page.all("a") if each.text.startswith("Read")]
    newest = ada.get(reads[0])
    assert [each.text for each in newest.all("h2")][:2] == ["You", "Reply"]
    assert "My name is Anna." in newest.text
    assert "Who am I?" in newest.text
    assert "Who am I?" not in ada.get(reads[-1]).text


def test_names_and_messages_that_look_like_markup_stay_text(ada: Browser) -> None:
    listed = ada.get("", q="<script>")
    [link] = [each for each in listed.all("a") if each.text == HOSTILE]
    page = ada.get(link.attributes["href"])
    assert page.all("h1")[0].text == HOSTILE
    assert page.all("p", **{"class": "text"})[0].text == MARKUP
    agent = ada.get("agent", id=HOSTILE)
    assert agent.all("h1")[0].text == HOSTILE
    for shown in (listed, page, agent, ada.get("", q=f'">{MARKUP}')):
        scripts = [each.attributes["src"] for each in shown.all("script")]
        assert scripts[0] == "/page/assets/page.js"
        assert {*scripts[1:]} < {"/page/assets/chat.js", "/page/assets/moving.js"}
        assert [each.attributes["src"] for each in shown.all("img")] == ["/page/assets/icon.svg"]


def test_forms_fork_roll_back_and_delete(ada: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    fork = ada.send(page, "fork", name="page/by hand", version=version(page, 2))
    assert "This agent was made" in fork.all("p", role="status")[0].text
    assert "fork of page/ada, version 2" in fork.text
    assert "exists" in ada.send(page, "fork", 409, name="page/by hand").text
    other = ada.send(fork, "fork", name="page/rolled")
    ada.send(other, "rollback", 404, version=version(other, 1).replace(":1", ":7"))
    back = ada.send(other, "rollback", version=version(other, 1))
    assert "version 1 rollback" in back.text
    assert ada.send(other, "rollback", 409, version=version(other, 1)).all("p", role="alert")
    for typed in ("", "page/rolle", "PAGE/ROLLED"):
        assert "nothing was deleted" in ada.send(back, "delete", 400, typed=typed).text
    assert "was deleted" in ada.send(back, "delete", typed="page/rolled").text
    ada.get("agent", 404, id="page/rolled")
    pinned = ada.get("agent", id="page/ada, as of the branch")
    [force] = pinned.all("input", name="force")
    assert force.attributes["type"] == "checkbox"


def test_an_exported_version_is_the_archive_that_a_client_gets(lived: Front, ada: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    exports = [each.attributes["href"] for each in page.all("a") if each.text.startswith("Export version 3")]
    answer = ada.answer(exports[0])
    assert "page-ada-3.kva" in answer.headers["content-disposition"]
    with lived.house.client(lived.keys["ada"]) as client:
        assert answer.content == b"".join(client.export_agent(BRANCHED, version=3))
    assert "there is no" in ada.get(exports[0].replace("page%2Fada", "nobody"), 404).text


def test_labels_are_set_and_removed(ada: Browser) -> None:
    page = ada.send(ada.get("agent", id=HOSTILE), "label", label="team", value=MARKUP)
    assert [each.text for each in page.all("dd")].count(MARKUP) == 1
    page = ada.send(page, "label", label="team", value="")
    assert MARKUP not in [each.text for each in page.all("dd")]
    assert "label" in ada.send(page, "label", 400, label=" ").text


def test_a_move_to_nobody_is_refused_with_and_without_scripts(ada: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    assert "no peer 'studio'" in ada.send(page, "move", 404, peer="studio").text
    fields = {**page.fields(page.form("move")), "peer": "studio"}
    answer = ada.post("move", fields, origin=ada.url, accept="text/event-stream")
    assert (answer.text[:15], "no peer 'studio'" in answer.text) == ("event: refused\n", True)
    assert ada.post("move", {**fields, "peer": " "}, origin=ada.url).status_code == 400


def test_an_agents_page_reports_what_its_last_turns_reused(lived: Front, ada: Browser, eve: Browser) -> None:
    say = {"append_messages": [{"role": "user", "content": "My name is Anna."}], "sampling": {"max_tokens": 8}}
    for namespace in ("ada", "eve", "ada"):
        url = f"{lived.gateway.url}/v1/agents/reused%2Fada/generate"
        assert httpx.post(url, json=say, headers=lived.bearer(namespace), timeout=60).status_code == 200
    rows = [each.text for each in ada.get("agent", id="reused/ada").all("li", **{"class": "row"})]
    assert len(rows) == 2
    assert re.search(r"[1-9]\d* of \d+ tokens from memory \(hot", rows[0])
    assert re.search(r"0 of \d+ tokens from memory \(cold: nothing is remembered", rows[1])
    assert len(eve.get("agent", id="reused/ada").all("li", **{"class": "row"})) == 1


def test_a_live_turn_is_shown_and_cancelled(lived: Front, ada: Browser, eve: Browser) -> None:
    with endless_turn(lived, "a story of the page") as reader:
        part = ada.get("turns")
        assert "a story of the page" in part.elements[0].text + ada.get("status").text
        assert "Turns: 1 running, 0 waiting." in [each.attributes.get("data-says") for each in part.elements]
        for page in (eve.get("status"), eve.get("turns")):
            assert "a story of the page" not in "".join(each.text for each in page.elements)
        forged = {
            "request_id": "a story of the page",
            "form_token": eve.get().all("input")[0].attributes["value"],
        }
        refused = eve.post("cancel", forged, origin=eve.url)
        assert refused.status_code == 404
        assert "was ended" in ada.send(ada.get("status"), "cancel").text
        reader.join(30)
        assert not reader.is_alive()


def test_a_key_sees_nothing_of_another_namespace(lived: Front, ada: Browser, eve: Browser) -> None:
    page = ada.get("agent", id=BRANCHED)
    asked = {"id": BRANCHED, "version": version(page, 1)}
    eve.get("agent", 404, id=BRANCHED)
    for name in ("chat", "said", "facts", "export"):
        eve.get(name, 404, **asked)
    overview = eve.get()
    assert "page/" not in overview.text
    assert overview.all("header")[0].text.split()[-3:] == ["second", "Sign", "out"]
    engines = lived.keys["engine-first"], lived.keys["engine-second"]
    with lived.house.store_client(engines[0]) as first, lived.house.store_client(engines[1]) as second:
        of_ada, of_eve = (
            {agent.agent_id for agent in store.list_agents(page_size=1000).agents} for store in (first, second)
        )
    assert BRANCHED in of_ada
    assert not (of_ada - of_eve).intersection(each.text for each in overview.all("a"))
    token = overview.all("input", name="form_token")[0].attributes["value"]
    for action, fields in WRITES.items():
        if "id" in fields:
            form = {**asked, "head": asked["version"], **fields, "form_token": token}
            answer = eve.post(action, form, origin=eve.url)
            assert answer.status_code == 404, (action, answer.text)
    assert version(ada.get("agent", id=BRANCHED), 6).endswith(":6")


def turns_of_the_hour(browser: Browser) -> int:
    page = browser.get("status")
    figure = page.all("figure")[0]
    counts = [int(each.text.replace(",", "")) for each in page.inside(figure, "strong")]
    assert ("No turns in the last hour." in figure.text) == (not any(counts))
    return sum(counts)


def test_the_hours_turns_are_the_own_namespaces(lived: Front, ada: Browser, eve: Browser) -> None:
    before = turns_of_the_hour(ada), turns_of_the_hour(eve)
    with lived.house.client(lived.keys["ada"]) as client:
        client.reply(prompt="Hello.", sampling={"max_tokens": 1})
    assert (turns_of_the_hour(ada), turns_of_the_hour(eve)) == (before[0] + 1, before[1])


@pytest.mark.long(2)
@pytest.mark.parametrize("action", WRITES)
def test_a_write_is_a_form_of_our_own(lived: Front, ada: Browser, action: str) -> None:
    page = ada.get("agent", id=BRANCHED)
    token = page.all("input", name="form_token")[0].attributes["value"]
    head = version(page, 6)
    form = {"version": version(page, 1), "head": head, **WRITES[action]}
    own = {"origin": ada.url}
    for headers, given, status in (
        ({}, token, 403),
        ({"origin": "https://evil.example"}, token, 403),
        ({"origin": "null"}, token, 403),
        (own, "", 403),
        (own, token[::-1], 403),
    ):
        refused = ada.post(action, {**form, "form_token": given}, **headers)
        assert refused.status_code == status, (headers, refused.text)
    ada.answer(action, 405)
    with_key = httpx.post(f"{ada.url}/page/{action}", data=form, headers={**own, "x-api-key": lived.keys["ada"]})
    assert with_key.status_code == 403
    assert version(ada.get("agent", id=BRANCHED), 6) == head
    large = ada.post(action, {"form_token": token, "x": "y" * (2 << 20 if action == "say" else 20000)}, **own)
    assert large.status_code == 413


def test_a_site_that_may_call_the_api_may_not_read_the_page(lived: Front) -> None:
    for path in ("/", "/page/turns", f"/page/agent?id={BRANCHED}"):
        answer = httpx.get(lived.gateway.url + path, headers={"origin": ORIGIN, "x-api-key": lived.keys["ada"]})
        assert answer.status_code == 403
        assert not {"page/ada", "form_token"} & set(re.split(r"[^\w/]", answer.text))
    assert httpx.get(lived.gateway.url, headers={**HTML, "x-api-key": lived.keys["ada"]}).status_code == 200


def pages(lived: Front, ada: Browser) -> Iterator[httpx.Response]:
    """Every kind of page."""
    agent = ada.get("agent", id=BRANCHED)
    read = next(each.attributes["href"] for each in agent.all("a") if each.text.startswith("Read"))
    for path in ("", "status", "chat", f"agent?id={BRANCHED}", read):
        yield ada.answer(path)
    yield ada.answer("agent?id=nobody", 404)
    yield httpx.get(lived.gateway.url, headers=HTML)


def test_no_page_names_another_host_or_carries_a_script(lived: Front, ada: Browser) -> None:
    for answer in pages(lived, ada):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
        for element in parsed(answer.text).elements:
            for name, value in element.attributes.items():
                assert not name.startswith("on"), element
                assert name != "style", element
                assert name not in ("src", "href", "action") or re.match(r"/(?!/)|#", value), element
            assert element.tag != "style"
            assert element.tag != "script" or not element.text
    for name in ("page.css", "page.js", "chat.js", "events.js", "moving.js", "icon.svg"):
        text = ada.answer(f"/page/assets/{name}").text
        assert "//" not in text.replace("// ", "").replace('xmlns="http://www.w3.org/2000/svg"', "")
    ada.answer("/page/assets/..%2Froutes.py", 404)


def test_every_page_can_be_read_aloud(lived: Front, ada: Browser) -> None:
    """What a browser's audit (`make test-page`) asks for, as far as it is in the text."""
    for answer in pages(lived, ada):
        page = parsed(answer.text)
        assert page.all("html", lang="en")
        assert [len(page.all(tag)) for tag in ("main", "header", "h1")] == [1, 1, 1]
        assert page.all("a", href="#main")
        labelled = {each.attributes.get("for") for each in page.all("label")}
        boxes = [
            each for tag in ("input", "select") for each in page.all(tag) if each.attributes.get("type") != "hidden"
        ]
        for box in boxes:
            assert box.attributes.get("id") in labelled or (box.parent is not None and box.parent.tag == "label"), box
        assert all("scope" in each.attributes for each in page.all("th"))
        assert all(each.attributes.get("alt") is not None for each in page.all("img"))
        names = [each.attributes["id"] for each in page.elements if "id" in each.attributes]
        assert len(names) == len(set(names))


@pytest.mark.long(2)
def test_an_engine_that_is_away_is_told_and_without_keys_only_loopback_is_served(tmp_path: Path) -> None:
    nowhere: Any = types.SimpleNamespace(
        root=tmp_path, engine=types.SimpleNamespace(address=f"unix:{tmp_path}/nobody.sock")
    )
    gateway = GatewayProcess(nowhere, "--no-keys", "--host", "kvasir.example")
    try:
        gateway.start()
        assert "The conversations cannot be shown." in Browser(gateway.url).get().text
        page = Browser(gateway.url).get("/page/status")
        assert "The engine does not answer." in page.text
        assert "the engine does not answer (UNAVAILABLE)" in page.all("p", role="alert")[0].text
        assert not [form for form in page.all("form") if form.attributes["action"].endswith("logout")]
        by_name = httpx.get(gateway.url, headers={**HTML, "host": "kvasir.example"})
        assert by_name.status_code == 403
        assert httpx.get(gateway.url, headers={"host": "evil.example"}).status_code == 403
    finally:
        gateway.kill()
