"""`kvasir open`: a code signs a browser in once; the key stands in no address, no argument and no page."""

import contextlib
import json
import socket
import webbrowser
from pathlib import Path

import httpx2 as httpx
import pytest
from kvasir.cli.caller import Caller
from kvasir.cli.running.home import Home, Running
from kvasir.cli.talking.browser import open_page
from kvasir.credentials import GATEWAY_MARK, write_private_text
from kvasir.errors import Unauthenticated, Unavailable

from tests.gateway.conftest import ORIGIN, Front
from tests.gateway.page.html_page import Browser


def caller_of(root: Path, url: str, token: str) -> Caller:
    """Of a home whose gateway is that one."""
    home = Home(root)
    home.make()
    home.write_running(Running(pid=0, store="", engine="", http=url.partition("//")[2], http_url=f"{url}/v1"))
    write_private_text(home.tokens / "client.token", token)
    return Caller(home, as_json=True)


@pytest.fixture(autouse=True)
def every_home_is_its_gateways(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = httpx.get(f"{front.gateway.url}/healthz").headers[GATEWAY_MARK]
    monkeypatch.setattr(Home, "gateway_mark", lambda _: shown)


@pytest.fixture
def caller(front: Front, tmp_path: Path) -> Caller:
    return caller_of(tmp_path / "home", front.gateway.url, front.keys["ada"])


def test_a_code_signs_a_browser_in_and_is_used_up(
    front: Front, caller: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    open_page(caller)
    url = json.loads(capsys.readouterr().out)["url"]
    browser = Browser(front.gateway.url)
    for _ in range(2):  # to look at the form uses nothing up
        page = browser.get(url)
    assert front.keys["ada"] not in url + page.text
    assert "Conversations" in browser.send(page, "login").all("h1")[0].text
    refused = Browser(front.gateway.url)
    assert "kvasir open" in refused.send(refused.get(url), "login", 401).text
    assert url.rpartition("=")[2] not in front.gateway.log


def test_the_operators_key_of_the_home_opens_the_page_and_another_on_request(
    front: Front, caller: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    """The home's operator is eve here: the page shows its namespace, and not the one of the client's key."""
    write_private_text(caller.home.tokens / "operator@home.token", front.keys["eve"])
    for given, namespace in ((None, "second"), (caller.home.tokens / "client.token", "first")):
        caller.token_file = given
        open_page(caller)
        page = Browser(front.gateway.url).get(json.loads(capsys.readouterr().out)["url"])
        assert f"the namespace {namespace}" in page.text


def test_a_link_to_one_of_several_namespaces_names_it_and_is_sent_by_a_person(
    front: Front, caller: Caller, capsys: pytest.CaptureFixture[str]
) -> None:
    open_page(caller)
    url = json.loads(capsys.readouterr().out)["url"]
    browser = Browser(front.gateway.url)
    page = browser.get(url)
    assert "the namespace first" in page.text
    assert "data-open" not in page.form("login").attributes, "a script would send it"
    browser.send(page, "login")
    assert "the namespace" not in Browser(front.gateway.url).get(url).text, "a used code tells nothing"


def test_a_browser_is_given_a_file_that_nobody_else_reads(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    caller.as_json = False
    open_page(caller)
    open_page(caller)
    file = caller.home.run / "open.html"
    assert opened == [file.as_uri()] * 2
    assert file.stat().st_mode & 0o777 == 0o600
    assert "/page/open?code=" in file.read_text()


def test_without_a_browser_the_address_is_printed(
    caller: Caller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(webbrowser, "open", lambda _url: False)
    caller = Caller(caller.home)
    open_page(caller)
    assert "/page/open?code=" in capsys.readouterr().out


def test_only_a_key_makes_a_code(front: Front) -> None:
    key = {"x-api-key": front.keys["ada"]}
    for headers, status in (({}, 401), ({"x-api-key": "no key"}, 401), ({**key, "origin": ORIGIN}, 403), (key, 200)):
        assert httpx.post(f"{front.gateway.url}/page/code", headers=headers).status_code == status
    browser = Browser(front.gateway.url)
    browser.sign_in(front.keys["ada"])
    assert browser.post("/page/code", {}, origin=front.gateway.url).status_code == 401


def test_a_gateway_that_is_away_or_knows_no_such_token_is_named(front: Front, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="up -d"):
        open_page(Caller(Home(tmp_path / "empty")))
    with pytest.raises(Unauthenticated, match="reload"):
        open_page(caller_of(tmp_path / "other", front.gateway.url, "another-token-of-no-one-000000"))
    with pytest.raises(Unavailable, match="does not answer"):
        open_page(caller_of(tmp_path / "gone", "http://127.0.0.1:9", front.keys["ada"]))


def test_a_program_that_does_not_show_a_mark_in_time_gets_no_token(
    front: Front, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvasir.cli.talking.browser.ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match="does not answer"):
            open_page(caller_of(tmp_path / "home", address, front.keys["ada"]))
        silent.settimeout(0.3)
        sent = list[bytes]()
        with contextlib.suppress(TimeoutError):
            while True:
                with silent.accept()[0] as connection:
                    sent.append(connection.recv(1 << 16))
    assert [each.split()[1] for each in sent] == [b"/healthz"]
