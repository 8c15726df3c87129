"""`kvasir open`: the page of the home's gateway in a browser, signed in by a code that opens it once."""

import asyncio
import json
import urllib.error
import urllib.request
import webbrowser
from html import escape
from http.client import HTTPException
from pathlib import Path
from typing import Annotated
from urllib.parse import urlencode

from kvasir.cli.caller import Caller
from kvasir.cli.running.health import Health, http_health
from kvasir.cli.running.own_credentials import people_token
from kvasir.cli.showing.arguments import option
from kvasir.credentials import read_token, replace_private_text
from kvasir.errors import Unauthenticated, Unavailable
from kvasir.waits import ANSWER_S


def open_page(
    caller: Caller,
    show: Annotated[bool, option("Print the address instead. It works once, within two minutes.", "--print")] = False,
) -> None:
    """Open the page, signed in: talk with agents, find conversations, see numbers, operate the home.

    It opens with the operator's key of this home, which programs do not have: their keys cannot manage tokens, peers or
    backups. With --token-file before the command it opens with that key."""
    running = caller.home.running()
    if running is None or not running.http_url:
        start = f"`{caller.home.command('up -d')}` starts one"
        how = f"first end what runs without HTTP, `{caller.home.command('down')}`; {start}" if running else start
        raise Unavailable(f"no gateway runs here: {how}", reason="NOT_RUNNING")
    site = running.http_url.removesuffix("/v1")
    found = asyncio.run(http_health(caller.home, running.http, ANSWER_S))
    if found in (Health.SILENT, Health.STOPPED):
        raise Unavailable(f"the gateway at {site} does not answer: `{caller.home.command('status')}`")
    if found is Health.FOREIGN:  # it gets no token of ours
        raise Unavailable(f"another program answers at {running.http}, not the gateway of {caller.home.root}")
    token = read_token(caller.token_file) if caller.token_file is not None else people_token(caller.home)
    code = _code(site, token)
    url = f"{site}/page/open?{urlencode({'code': code})}" if code else f"{site}/"
    if not (show or caller.as_json):
        # Other users of the machine see a browser's arguments: they are given a file's name.
        if webbrowser.open(_page_of(caller.home.run / "open.html", url).as_uri()):
            caller.say(f"{site}/ opens in your browser")
            return
        caller.say("no browser can be opened here; this opens it once, within two minutes:")
    caller.result({"url": url}, url)


def _code(site: str, token: str) -> str:
    """A code of the gateway; empty where it wants no key. Raises Unauthenticated, Unavailable."""
    request = urllib.request.Request(f"{site}/page/code", method="POST", headers={"authorization": f"Bearer {token}"})  # noqa: S310 - the scheme is ours
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
            return str(json.load(answer)["code"])
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise Unauthenticated(f"the gateway at {site} does not know the token: kvasir reload") from None
        raise Unavailable(f"the gateway at {site} answers {error.code}") from None
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise Unavailable(f"the gateway at {site} does not answer: {error}") from None


def _page_of(path: Path, url: str) -> Path:
    """A file that none but its owner reads and that goes to this address."""
    text = (
        f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(url)}"><a href="{escape(url)}">Kvasir</a>\n'
    )
    replace_private_text(path, text)
    return path
