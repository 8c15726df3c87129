"""The operator's half of the page: rights, forms and secrets, before real services, by the commands of a real home."""

import asyncio
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from google.protobuf.json_format import ParseDict
from google.rpc.status_pb2 import Status
from kvasir.cli.running.home import Home, Running
from kvasir.credentials import ADMIN, CLIENT, OWNER, Principal, read_credentials
from kvasir.status import from_status
from kvasir_gateway.door.security import KeyHolder
from kvasir_gateway.page.looking import Panel
from kvasir_gateway.page.operating.commands import HomeCommands
from kvasir_gateway.page.operating.jobs import Job
from kvasir_gateway.page.operating.part import Operating
from kvasir_gateway.page.rendering import page
from kvasir_gateway.page.sessions import Visitor

from tests.cli.running import Cli, free_port, in_process
from tests.gateway.conftest import Front
from tests.gateway.page.html_page import Browser, Html, parsed
from tests.gateway.page.test_operator_page import WRITES
from tests.gateway.serving import OPERATOR, GatewayProcess, running_gateway
from tests.running import in_memory

PAGES = ("home", "tokens", "peers", "keys", "models", "audit")
OWN_WRITES = ("token-new", "token-rm", "pair", "unpair", "fetch", "backup", "job-stop")


@pytest.fixture(scope="module")
def operated(front: Front) -> Iterator[GatewayProcess]:
    """A gateway of the shared services that is given their folder as a home, as `kvasir up` would make it."""
    root, house = front.house.root, front.house
    (root / "store").symlink_to("data")
    home = Home(root)
    home.make()
    home.write_running(Running(pid=1, store=house.store.address, engine=house.engine.address))
    options = ("--credentials", str(home.credentials_file), "--home", str(root), "--service-admin", OPERATOR)
    audit = ("--audit-file", str(home.audit_file("http")))
    with running_gateway(house, *options, *audit, name="operated") as gateway:
        yield gateway


@pytest.fixture
def olga(front: Front, operated: GatewayProcess) -> Browser:
    browser = Browser(operated.url)
    browser.sign_in(front.keys[OPERATOR])
    return browser


def test_only_the_operator_sees_and_changes_the_home(front: Front, operated: GatewayProcess) -> None:
    ada = Browser(operated.url)
    page = ada.sign_in(front.keys["ada"])
    assert "Operate" not in page.text
    token = page.all("input", name="form_token")[0].attributes["value"]
    before = (front.house.root / "credentials.toml").read_text()
    for name in (*PAGES, "job"):
        assert "only who operates this home" in ada.get(name, 403, kind="pair").text
    for name in OWN_WRITES:
        answer = ada.post(name, {**WRITES[name], "form_token": token}, origin=ada.url)
        assert (answer.status_code, "only who operates this home" in answer.text) == (403, True), name
    assert (front.house.root / "credentials.toml").read_text() == before


def test_where_the_home_lies_is_shown_to_its_operator_alone(tmp_path: Path) -> None:
    admin = frozenset({CLIENT, ADMIN})
    operating = Operating(tmp_path, ["olga"], time.time)
    for name, roles, token, typed in (
        ("olga", admin, "key", f"kvasir --home {tmp_path} up"),
        ("ada", admin, "key", "kvasir up"),
        ("olga", frozenset({CLIENT}), "key", "kvasir up"),
        ("olga", admin, None, "kvasir up"),
    ):
        holder = KeyHolder(Principal(name, "first", roles), token)
        assert operating.command(holder)("up") == typed


def test_a_form_of_another_site_or_visit_operates_nothing(olga: Browser, front: Front) -> None:
    token = olga.get("tokens").all("input", name="form_token")[0].attributes["value"]
    before = (front.house.root / "credentials.toml").read_text()
    for name in OWN_WRITES:
        for headers, given, told in (
            ({"origin": "https://evil.example"}, token, "origin"),
            ({}, token, "origin"),
            ({"origin": olga.url}, token[::-1], "an earlier visit"),
        ):
            answer = olga.post(name, {**WRITES[name], "form_token": given}, **headers)
            assert (answer.status_code, told in answer.text) == (403, True), name
    assert (front.house.root / "credentials.toml").read_text() == before
    assert [each.attributes for each in olga.get("job", kind="pair").all("span")] == [{"data-says": ""}]


def test_a_gateway_without_a_home_has_no_operator(front: Front) -> None:
    stranger = Browser(front.gateway.url)
    assert "Operate" not in stranger.sign_in(front.keys[OPERATOR]).text
    stranger.get("home", 403)


@pytest.mark.long(5)
def test_the_disk_and_memories_that_are_not_stored_are_shown(olga: Browser) -> None:
    page = olga.get("home")
    assert "Operate" in olga.get().text
    [disk] = page.all("progress")
    assert 0 < int(disk.attributes["value"]) < int(disk.attributes["max"])
    assert re.search(r"[\d.]+ GiB free of [\d.]+ [GT]iB", page.text)
    assert re.search(r"Memories not stored none 0 0 bytes", page.text)
    assert "backup DIR makes the first one" in page.text
    assert "has no backup yet" in _ended(olga, "home", "backup").text


def _ended(browser: Browser, name: str, form: str, **filled: str) -> Html:
    """A page's form is sent, and what it begins has ended."""
    token = browser.get(name).all("input", name="form_token")[0].attributes["value"]
    assert browser.post(form, {"form_token": token, **filled}, origin=browser.url).status_code == 303
    give_up = time.monotonic() + 60
    while (page := browser.get(name)).all("button", **{"data-keeps": "stop"}):
        assert time.monotonic() < give_up
    return page


@pytest.mark.long(12)
def test_a_token_is_shown_once_and_can_be_revoked(olga: Browser, front: Front, operated: GatewayProcess) -> None:
    made = olga.send(olga.get("tokens"), "token-new", 400, name="by hand", namespace="first")
    assert "NAME: expected 1 to 64 letters" in made.text
    odd = olga.send(olga.get("tokens"), "token-new", 400, name="--role=admin", namespace="first")
    assert "NAME: expected" in odd.text
    made = olga.send(olga.get("tokens"), "token-new", name="byhand", namespace="first", role="client,admin")
    token = next(each.text for each in made.all("code") if re.fullmatch(r"[\w-]{43}", each.text))
    assert "it is made, and counts later" in made.text.lower()  # no `kvasir up` runs here that could be told
    known = read_credentials(front.house.root / "credentials.toml").principal_of(token)
    assert known is not None
    assert (known.name, known.namespace, known.roles) == ("byhand", "first", {"client", "admin"})
    assert token not in olga.answer("tokens").text + operated.log
    assert "there is a token" in olga.send(olga.get("tokens"), "token-new", 400, name="BYHAND", namespace="first").text
    listed = olga.get("tokens")
    names = [
        each.attributes["value"] for each in listed.all("input", type="hidden") if each.attributes["name"] == "name"
    ]
    assert "byhand" in names
    assert not {"engine-first", "client"} & {*names}
    form = {"form_token": listed.all("input", name="form_token")[0].attributes["value"], "name": "byhand"}
    gone = olga.post("token-rm", form, origin=olga.url)
    assert "the token is removed" in gone.text
    assert read_credentials(front.house.root / "credentials.toml").principal_of(token) is None
    assert olga.post("token-rm", form, origin=olga.url).status_code == 404
    assert "own, without which" in olga.post("token-rm", {**form, "name": "engine-first"}, origin=olga.url).text


@pytest.mark.long(3)
def test_the_audit_shows_refusals_and_takes_filters(olga: Browser, operated: GatewayProcess) -> None:
    httpx.get(f"{operated.url}/v1/models", headers={"x-api-key": "a-key-that-nobody-has-0000000000000000"})
    refused = olga.get("audit", refused="yes", since="1d")
    assert "key" in [each.text for each in refused.all("th", scope="row")]
    assert {each.text for each in refused.all("span", **{"class": "state bad"})} == {"refused"}
    assert "--since: expected" in olga.get("audit", 400, since="yesterday").text
    assert olga.get("audit", agent="nobody at all").all("p", **{"class": "nothing"})


@pytest.mark.long(2)
def test_of_a_long_audit_the_newest_lines_are_shown(olga: Browser, front: Front) -> None:
    file = Home(front.house.root).audit_file("store")
    file.parent.mkdir(mode=0o700, exist_ok=True)  # the test that audits may not have run before
    lines = [
        {"at": f"2099-01-01T00:00:00.{each:03}+00:00", "agent": "busy", "what": f"a/D{each}"} for each in range(201)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    try:
        page = olga.get("audit", agent="busy")
        names = [each.text for each in page.all("th", scope="row")]
        assert (names[0], names[-1], len(names)) == ("D200", "D1", 200)
        assert "The newest 200 lines" in page.text
        file.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
        assert "The newest" not in olga.get("audit", agent="busy").text
    finally:
        file.unlink()


@pytest.mark.long(2)
def test_a_home_whose_services_do_not_run_is_shown(tmp_path: Path) -> None:
    status = asyncio.run(HomeCommands(tmp_path).value("status"))
    status["backup"] = dict.fromkeys(("files", "bytes", "damaged"), 0) | {"ended_at": "2099-01-01T00:00:00+00:00"}
    status["backup"]["folder"] = "/Volumes/My Disk/kept"
    visitor = Visitor(KeyHolder(OWNER, None), "form", "address")
    shown = page("operating/home.html", found=Panel(status), kind="backup", job=None, **_frame(visitor))
    text = parsed(shown.body.decode()).text
    assert "The store does not answer" in text
    assert "The engine does not answer" in text
    assert "kvasir --home NEW restore '/Volumes/My Disk/kept'" in text


def test_a_code_stays_on_the_page_when_another_mac_is_refused() -> None:
    job = Job("another Mac", 0)
    job.read_out('{"event": "waiting", "code": "ABCD-EFGH", "line": "l", "address": "studio:1", "seconds": 600}\n')
    job.read_out('{"event": "refused", "from": "<b>", "reason": "PAIRING_REFUSED", "message": "a wrong code"}\n')
    visitor = Visitor(KeyHolder(OWNER, None), "form", "address")
    shown = page("operating/job.html", kind="pair", job=job, **_frame(visitor)).body.decode()
    assert "&lt;b&gt; was refused: a wrong code" in shown
    assert "kvasir pair ABCD-EFGH --at studio:1" in shown


def test_a_pairing_is_shown_whatever_strangers_in_the_network_had_refused() -> None:
    job = Job("another Mac", 0)
    job.read_out('{"event": "waiting", "code": "ABCD-EFGH", "line": "l", "address": "studio:1", "seconds": 600}\n')
    for _ in range(20):
        job.read_out(f'{{"event": "refused", "from": "{"x" * 100}", "message": "malformed"}}\n' * 1000)
    assert job.told["code"] == "ABCD-EFGH"
    job.read_out('{"event": "paired", "name": "mini"}\n')
    job.end(0, "", 1)
    assert job.value == {"event": "paired", "name": "mini"}


@pytest.mark.long(7)
def test_a_long_result_of_several_lines_is_whole() -> None:
    job, result = Job("this home", 0), {"files": 3, "damaged": ["x" * 90] * 30_000}
    text = json.dumps(result, indent=2)
    for start in range(0, len(text), 1 << 16):
        job.read_out(text[start : start + (1 << 16)])
    job.end(1, "", 1)
    assert job.value == result


def _frame(visitor: Visitor) -> dict[str, Any]:
    return {"visitor": visitor, "at": "/page/a/", "namespace": "default", "now": 0.0, "done": ""} | {
        "is_operator": True,
        "command": "kvasir --home there {}".format,
    }


@pytest.mark.long(2)
def test_sealed_namespaces_are_listed_with_the_commands_for_keys(olga: Browser, front: Front) -> None:
    page = olga.get("keys")
    assert "No namespace is sealed" in page.text
    assert f"kvasir --home {front.house.root} keys rotate" in page.text


@pytest.mark.long(3)
def test_each_sealed_namespace_is_a_row_with_its_master_key_or_its_end(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for words in (("new", "work"), ("new", "gone"), ("erase", "gone", "--yes")):
        assert in_process("--home", home, "keys", *words).code == 0
    listed = asyncio.run(HomeCommands(home).value("keys", "ls"))
    [key] = next(each["master_ids"] for each in listed["namespaces"] if each["namespace"] == "work")
    visitor = Visitor(KeyHolder(OWNER, None), "form", "address")
    shown = parsed(page("operating/keys.html", listed=Panel(listed), **_frame(visitor)).body.decode())
    rows = [" ".join(each.text.split()) for each in shown.all("li", **{"class": "row"})]
    assert rows[:2] == [
        "gone its key was destroyed: nobody reads it again erased 0 files, 0 bytes",
        f"work opened by master key {key} sealed 0 files, 0 bytes",
    ]


@pytest.mark.long(6)
def test_every_page_of_the_operator_can_be_read_aloud_and_has_no_script_of_its_own(olga: Browser) -> None:
    for name in PAGES:
        page = olga.get(name)
        assert [len(page.all(tag)) for tag in ("main", "header", "h1")] == [1, 1, 1]
        labelled = {each.attributes.get("for") for each in page.all("label")}
        for box in [*page.all("input"), *page.all("select")]:
            is_told = box.attributes.get("id") in labelled or (box.parent is not None and box.parent.tag == "label")
            assert box.attributes.get("type") == "hidden" or is_told, box
        names = [each.attributes["id"] for each in page.elements if "id" in each.attributes]
        assert len(names) == len(set(names))
        assert not [each for each in page.elements if "style" in each.attributes or each.tag == "style"]


@pytest.mark.long(7)
def test_a_home_is_operated_by_its_page_alone(tmp_path: Path) -> None:
    """Tokens count at once and end at once, two homes pair and part, and a backup goes on from the last one."""
    cli, other = Cli(in_memory.home()), Cli(in_memory.home())
    try:
        up = cli.done("up", "-d", "--json", "--http", f"127.0.0.1:{free_port()}").value
        url = up["http_url"].removesuffix("/v1")
        cli.done("backup", tmp_path / "backup")
        browser = Browser(url)
        _an_apps_key_operates_nothing(url, (cli.home / "tokens" / "client.token").read_text().strip())
        key = (cli.home / "tokens" / "operator@home.token").read_text().strip()
        browser.sign_in(key)
        _new_token_counts_at_once(browser, url)
        _two_homes_pair_and_part(browser, other)
        page = _ended(browser, "home", "backup")
        assert "The backup is whole" in page.text
        assert "every file was whole" in page.text
        log = "".join(file.read_text() for file in (cli.home / "logs").glob("*.log"))
        assert key not in log
    finally:
        cli("down")
        for each in (cli, other):
            shutil.rmtree(each.home, ignore_errors=True)


def _an_apps_key_operates_nothing(url: str, key: str) -> None:
    """A program that talks with the home's client token is no operator, by a session or by the key itself."""
    app = Browser(url)
    assert "Operate" not in app.sign_in(key).text
    for name in PAGES:
        assert "`kvasir open`" in app.get(name, 403).text
    assert httpx.get(f"{url}/v1/models", headers={"x-api-key": key}).status_code == 200
    refused = httpx.get(f"{url}/page/tokens", headers={"x-api-key": key})
    error = from_status(ParseDict(refused.json()["error"], Status()))
    assert (refused.status_code, error.reason, error.metadata) == (403, "ROLE_REQUIRED", {"roles": "admin"})
    assert "`kvasir open`" in error.message


def _new_token_counts_at_once(browser: Browser, url: str) -> None:
    made = browser.send(browser.get("tokens"), "token-new", name="app", namespace="lab")
    token = next(each.text for each in made.all("code") if re.fullmatch(r"[\w-]{43}", each.text))
    assert not made.all("p", role="alert")

    def status() -> int:
        return httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {token}"}).status_code

    assert status() == 200
    assert "Its calls have ended" in browser.send(browser.get("tokens"), "token-rm").text
    assert status() == 401


def _two_homes_pair_and_part(browser: Browser, other: Cli) -> None:
    page = browser.send(browser.get("peers"), "pair", gives="move", takes="copy")
    give_up = time.monotonic() + 60
    while "kvasir-pair:" not in page.text:
        assert time.monotonic() < give_up
        page = browser.get("peers")
    assert "there is one already" in browser.send(page, "pair", 400).text
    [line, *_] = re.findall(r"kvasir-pair:\S+", page.text)
    other.done("pair", line.rstrip("."), "--as", "studio", "--name", "laptop")
    while "Paired with laptop" not in page.text:
        assert time.monotonic() < give_up
        page = browser.get("peers")
    [row] = page.all("li", **{"class": "row"})
    assert "may default=move here" in " ".join(row.text.split())
    assert "It is no peer any more" in browser.send(page, "unpair").text
    assert "No other home is paired" in browser.get("peers").text
    assert browser.send(page, "unpair", 404).all("p", role="alert")
