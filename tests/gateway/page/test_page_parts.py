"""The page's parts without services: the drawn tree, the ring of an hour, bars, and who is let in."""

import asyncio
import json
import resource
import shutil
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from kvasir.cachestore.v1 import cachestore_pb2
from kvasir.credentials import CLIENT, PEER, Credential, Credentials, Principal, hash_token
from kvasir.errors import PermissionDenied, Unauthenticated
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway.door.bodies import Rooms
from kvasir_gateway.door.security import Gate
from kvasir_gateway.metrics import _ROUTE, CountedApp, GatewayNumbers
from kvasir_gateway.page import routes
from kvasir_gateway.page.conversation.listing import day_of
from kvasir_gateway.page.conversation.transcript import _read
from kvasir_gateway.page.look import Sources
from kvasir_gateway.page.managing import _progress
from kvasir_gateway.page.numbers.chart import HEIGHT, chart
from kvasir_gateway.page.numbers.history import MINUTES, History, Speed
from kvasir_gateway.page.operating.part import Operating
from kvasir_gateway.page.rendering import age, size
from kvasir_gateway.page.routes import GatewayPage
from kvasir_gateway.page.sessions import LIFETIME_S, Codes, Opened, Sessions, Visitor, check_own_form, cookie_name
from kvasir_gateway.page.tree import Row, rows
from kvasir_gateway.reading.titles import first_words, title_of
from kvasir_gateway.turn import Said
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.made_models.synthetic import SMALL, SyntheticAgent

ASSETS = Path(routes.__file__).parent / "assets"
KEY = "kvasir-test-key-of-the-page-00000000"
OTHER_KEY = "kvasir-test-key-of-the-page-11111111"


def drawn(bases: Mapping[int, int], *, has_older: bool = False) -> list[Row]:
    versions = [
        cachestore_pb2.SnapshotVersion(version=version, parent_version=version - 1, base_version=base)
        for version, base in bases.items()
    ]
    return rows(versions, has_older=has_older)


def places(found: list[Row]) -> list[int]:
    """The lane of each node."""
    return [(int(row.node[1:].split()[0]) - 10) // 16 for row in found]


def test_a_line_without_branches_is_one_lane() -> None:
    found = drawn({3: 2, 2: 1, 1: 0})
    assert places(found) == [0, 0, 0]
    assert [row.strokes for row in found] == [["M10 20V40"], ["M10 0V20", "M10 20V40"], ["M10 0V20"]]
    assert [row.is_newest for row in found] == [True, False, False]


def test_a_branch_has_a_lane_of_its_own_that_ends_in_its_base() -> None:
    found = drawn({4: 1, 3: 2, 2: 1, 1: 0})
    assert places(found) == [0, 1, 1, 0]
    assert [row.is_branch for row in found] == [True, False, False, False]
    assert found[3].strokes == ["M10 0V20", "M26 0C26 20 10 0 10 20"]
    assert {row.width for row in found} == {36}


def test_a_lane_is_free_again_behind_its_base() -> None:
    assert places(drawn({6: 4, 5: 3, 4: 3, 3: 1, 2: 1, 1: 0})) == [0, 1, 0, 0, 1, 0]


def test_a_base_that_was_retired_ends_the_lane_and_one_on_the_next_page_goes_on() -> None:
    assert drawn({9: 3})[0].strokes == []
    assert drawn({9: 3}, has_older=True)[0].strokes == ["M10 20V40"]


def test_a_thousand_branches_stay_in_the_picture() -> None:
    assert max(row.width for row in drawn(dict.fromkeys(range(200, 1, -1), 1) | {1: 0})) < 500


class Clock:
    def __init__(self) -> None:
        self.now_s = 6000.0

    def __call__(self) -> float:
        return self.now_s


def counted(namespace: str = "first", **sources: int) -> pb.NamespaceStats:
    return pb.NamespaceStats(namespace=namespace, sources=sources, misses={"new_agent": sources.get("cold", 0)})


SEES_ALL = pb.GetStatsResponse(engine=pb.EngineStats())


def test_the_hour_counts_what_was_added_since_the_look_before() -> None:
    clock = Clock()
    history = History(clock)
    history.note(counted(cold=5))
    clock.now_s += 30
    history.note(counted(cold=6, hot=2))
    clock.now_s += 60
    history.note(counted(cold=6, hot=3))
    *older, before, now = history.last_hour("first")
    assert len(older) == MINUTES - 2
    assert (before.sources, before.misses) == ({"cold": 1, "hot": 2}, {"new_agent": 1})
    assert (now.sources, now.misses) == ({"hot": 1}, {})
    assert not any(minute.sources for minute in (*older, *history.last_hour("second")))


def test_an_engine_that_started_again_counts_from_nothing() -> None:
    history = History(Clock())
    history.note(counted(cold=50))
    history.note(counted(cold=3))
    assert history.last_hour("first")[-1].sources == {"cold": 3}


def test_a_namespace_that_a_look_at_all_did_not_see_had_done_nothing() -> None:
    """A user's first turn, and then the page, come before the next look at all."""
    history = History(Clock())
    history.note_all(SEES_ALL)
    history.note(counted(cold=4))
    assert history.last_hour("first")[-1].sources == {"cold": 4}


def test_the_ring_keeps_an_hour_and_256_namespaces() -> None:
    clock = Clock()
    history = History(clock)
    for count in range(200):
        history.note(counted(cold=count))
        clock.now_s += 60
    hour = history.last_hour("first")
    assert sum(minute.sources["cold"] for minute in hour) == MINUTES - 1
    history.note_all(SEES_ALL)
    for number in range(300):
        history.note(counted(f"n{number}", cold=1))
    assert len(history._watched) == 256
    assert not any(minute.sources for minute in history.last_hour("first"))


def test_no_tokens_of_prompts_are_kept() -> None:
    """A caller may have them reported with each of its turns, 100,000 of them."""
    history, tokens = History(Clock()), range(100_000)
    before_kib = _most_kib()
    for number in range(200):
        parted = pb.Difference(message=1, given="a", remembered="b")
        started = pb.Started(prompt_tokens=len(tokens), prompt_token_ids=tokens, difference=parted)
        history.began("first", f"agent {number}", started)
    newest = history.parted("first")[0].started
    assert (newest.difference.given, len(newest.prompt_token_ids)) == ("a", 0)
    assert history.turns_of("first", "agent 199")[0].parted == parted
    assert _most_kib() - before_kib < 40_000  # all of them would be 80 MB, and 8 MB more


def _most_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def test_bars_stand_on_one_another_and_totals_say_the_same() -> None:
    found = chart([{}, {"cold": 1, "hot": 3}, {"odd": 2}], ("hot", "cold"))
    assert [(bar.column, bar.top, bar.height) for bar in found.bars] == [(1, 25, 75), (1, 0, 25), (2, 50, HEIGHT / 2)]
    assert [(total.name, total.count) for total in found.totals] == [("hot", 3), ("cold", 1), ("odd", 2)]
    assert (found.most, found.count) == (4, 6)


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (5 << 40, "5.0 TiB")],
)
def test_sizes_are_shown_in_their_largest_unit(count: int, told: str) -> None:
    assert size(count) == told


def test_ages_are_shown_in_their_largest_unit() -> None:
    assert [age(seconds) for seconds in (-3, 59, 60, 7200, 90000)] == ["0 s", "59 s", "1 min", "2 h", "1 d"]


def sessions(gate: Gate, clock: Callable[[], float]) -> Sessions:
    numbers = iter(range(10_000))
    return Sessions(gate, clock=clock, new_secret=lambda: f"secret {next(numbers)}")


def look(known: Sessions, opened: Opened) -> Visitor:
    return known.visitor({}, {cookie_name(opened.address): opened.cookie}, opened.address)


def keyed() -> Gate:
    named = {"ada": ("first", KEY), "eve": ("second", OTHER_KEY)}
    return Gate(
        Credentials(
            [
                Credential(Principal(name, namespace, frozenset({CLIENT})), hash_token(key))
                for name, (namespace, key) in named.items()
            ]
        )
    )


def test_a_session_ends_by_itself_and_the_oldest_make_room() -> None:
    clock = Clock()
    known = sessions(keyed(), clock)
    opened = known.begin(KEY)
    clock.now_s += LIFETIME_S - 1
    assert look(known, opened).holder.principal.namespace == "first"
    clock.now_s += 1
    with pytest.raises(Unauthenticated):
        look(known, opened)
    of_other = known.begin(OTHER_KEY)
    first, *_, last = [known.begin(KEY) for _ in range(1001)]
    with pytest.raises(Unauthenticated):
        look(known, first)
    assert look(known, last).address == last.address
    assert look(known, of_other).address == of_other.address, "nobody ends another's"


def test_a_session_is_its_cookie_at_its_own_address() -> None:
    known = sessions(keyed(), Clock())
    one, other = known.begin(KEY), known.begin(KEY)
    for cookie, address in ((one.cookie, ""), (one.cookie, other.address), ("", one.address), (one.address,) * 2):
        with pytest.raises(Unauthenticated):
            known.visitor({}, {cookie_name(address): cookie}, address)
    known.end(one.cookie)
    with pytest.raises(Unauthenticated):
        look(known, one)
    assert look(known, other)


def test_each_session_has_a_form_token_of_its_own() -> None:
    known = sessions(keyed(), Clock())
    tokens = {look(known, known.begin(KEY)).form_token for _ in range(3)}
    assert len({*tokens, known.lobby_token, known.visitor({"x-api-key": KEY}, {}).form_token}) == 5


def test_without_keys_only_a_loopback_name_is_served() -> None:
    known = sessions(Gate(None, hosts=["kvasir.example"]), Clock())
    for host in ("127.0.0.1:8642", "localhost", "[::1]:8642"):
        assert known.visitor({"host": host}, {}).holder.token is None
    with pytest.raises(PermissionDenied):
        known.visitor({"host": "kvasir.example"}, {})


@pytest.mark.parametrize(
    "host",
    [
        *("[::1]evil.example", "[127.0.0.1]", "[localhost]", "[::1]@evil.example", "localhost@evil.example", "[::1"),
        *(
            "127.0.0.1.evil.example",
            "127.0.0.1:x",
            "localhost:8642:1",
            "localhost/evil.example",
            "evil.example#localhost",
        ),
        *("2130706433", "0x7f.1", "localhost evil.example", "localhost\\evil.example", "[::1]:8642evil.example", ""),
    ],
)
def test_a_host_that_only_begins_or_ends_like_ours_is_none(host: str) -> None:
    gate = Gate(None, hosts=["kvasir.example"])
    for headers in ({"host": host}, {"host": "localhost", "origin": f"http://{host}"}):
        with pytest.raises(PermissionDenied):
            gate.check_site(headers)
    for ours in ("[::1]:8642", "127.0.0.1", "LOCALHOST:1", "kvasir.example:443"):
        gate.check_site({"host": ours, "origin": f"https://{ours}"})
        with pytest.raises(PermissionDenied):  # another program's page
            gate.check_site({"host": ours, "origin": "http://localhost:3000"})


@pytest.mark.parametrize(
    ("origin", "token"),
    [
        (None, "t"),
        ("null", "t"),
        ("http://127.0.0.1:9999", "t"),
        ("http://evil.example", "t"),
        ("http://127.0.0.1:8642", ""),
    ],
)
def test_a_form_of_another_site_or_without_our_token_is_refused(origin: str | None, token: str) -> None:
    own = {"host": "127.0.0.1:8642", "origin": "http://127.0.0.1:8642"}
    check_own_form(own, "t", "t")
    headers = {**own, "origin": origin} if origin is not None else {"host": own["host"]}
    with pytest.raises(PermissionDenied):
        check_own_form(headers, token, "t")


def test_a_code_opens_once_within_two_minutes_and_the_oldest_make_room() -> None:
    clock, numbers = Clock(), iter(range(10_000))
    codes = Codes(clock, lambda: f"code {next(numbers)}")
    code = codes.new(KEY)
    assert codes.key(code) == codes.key(code) == codes.take(code) == KEY
    assert codes.key(code) == ""
    for used in (code, "", "guessed"):
        with pytest.raises(Unauthenticated, match="kvasir open"):
            codes.take(used)
    late, of_other = codes.new(KEY), codes.new(OTHER_KEY)
    assert [codes.new(KEY) for _ in range(1001)][-1]
    assert codes.take(of_other) == OTHER_KEY, "nobody ends another's"
    with pytest.raises(Unauthenticated):
        codes.take(late)
    late = codes.new(KEY)
    clock.now_s += 120
    assert codes.key(late) == ""
    with pytest.raises(Unauthenticated):
        codes.take(late)


def test_a_clock_that_is_set_ends_and_keeps_no_session_and_no_code() -> None:
    set_clock, passed, rooms = Clock(), Clock(), Rooms(4, 1 << 20)
    engine: Any = types.SimpleNamespace(of=lambda *_: types.SimpleNamespace(client=None))
    needs: Any = sessions(keyed(), passed), History(set_clock), None, Operating(None, (), set_clock)
    page = GatewayPage(engine, *needs, Sources(set_clock, Clock(), lambda: "0"))
    app = CountedApp(Starlette(routes=page.routes(rooms)), GatewayNumbers())
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as browser:
        code = browser.post("/page/code", headers={"x-api-key": KEY}).json()["code"]
        set_clock.now_s += 24 * 3600
        filled = {"code": code, "form_token": needs[0].lobby_token}
        at = browser.post("/page/login", data=filled, headers={"origin": "http://localhost"}).headers["location"]
        set_clock.now_s += 24 * 3600
        assert browser.get(f"{at}home").status_code == 403, "its holder does not operate it"
        set_clock.now_s -= 100 * 3600
        passed.now_s += LIFETIME_S
        assert browser.get(f"{at}home").status_code == 401


def asked(rooms: Rooms, method: str, path: str, send: Callable[[Any], Awaitable[None]]) -> None:
    """A request of a key's holder to the page, not from a page of ours; nothing of it may be read."""
    gate = Gate(Credentials(()).with_tokens({Principal("ada", "first", frozenset({CLIENT})): KEY}))
    engine: Any = types.SimpleNamespace(of=lambda *_: types.SimpleNamespace(client=None))
    needs: Any = sessions(gate, Clock()), History(Clock()), None, Operating(None, (), Clock())
    page = GatewayPage(engine, *needs, Sources(Clock(), Clock(), lambda: "0"))
    [route] = [each for each in page.routes(rooms) if each.path == path and method in (each.methods or ())]
    headers = [(b"accept", b"text/html"), (b"x-api-key", KEY.encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b"", "path_params": {}}
    scope |= {"scheme": "http", "server": ("127.0.0.1", 1), _ROUTE: list[str]()}

    async def receive() -> Any:
        raise AssertionError

    asyncio.run(route.app(scope, receive, send))


@pytest.mark.parametrize(("method", "path"), [("GET", "/page/chat"), ("POST", "/page/say"), ("GET", "/")])
def test_a_page_counts_as_a_request_until_its_answer_is_sent(method: str, path: str) -> None:
    rooms, sent = Rooms(4, 1 << 20), list[Any]()

    async def send(message: Any) -> None:
        sent.append((rooms.requests.held("first"), message.get("status")))

    for _ in range(3):
        rooms.requests.take("first", 1)
    asked(rooms, method, path, send)
    assert sent[0] == (3, 429)
    rooms.requests.give_back("first", 3)
    sent.clear()
    asked(rooms, method, path, send)
    assert sent[0][0] == 1
    assert sent[0][1] != 429
    assert rooms.requests.held_by_all == 0


@pytest.mark.parametrize("path", ["/page/say", "/page/delete", "/page/login"])
def test_a_form_that_no_page_of_ours_sent_is_refused_before_any_of_it_is_read(path: str) -> None:
    statuses = list[int]()

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    asked(Rooms(4, 1 << 20), "POST", path, send)
    assert statuses[0] == 403


def test_a_code_is_sent_by_itself_where_all_keys_open_the_same_agents() -> None:
    def confirmed(*others: Principal) -> str:
        principals = dict.fromkeys([Principal("ada", "first", frozenset({CLIENT})), *others])
        keys = {principal: f"{KEY}{number}" for number, principal in enumerate(principals)}
        known = sessions(Gate(Credentials(()).with_tokens(keys)), Clock())
        assert known.to_confirm("") == known.to_confirm(OTHER_KEY) == ""
        return known.to_confirm(f"{KEY}0")

    assert confirmed() == ""
    assert confirmed(Principal("bo", "first", frozenset({CLIENT}))) == ""
    assert confirmed(Principal("peer", "second", frozenset({PEER}))) == "", "no peer opens the page"
    assert confirmed(Principal("bo", "second", frozenset({CLIENT}))) == "first"


def test_a_namespace_keeps_the_last_turns_of_256_agents_and_8_of_each() -> None:
    history = History(Clock())
    for number in range(20):
        history.began("first", "ada", pb.Started(prompt_tokens=number))
    assert [each.prompt_tokens for each in history.turns_of("first", "ada")] == [*range(19, 11, -1)]
    for number in range(300):
        history.began("first", f"agent {number}", pb.Started())
        history.began("second", "", pb.Started())
    assert not history.turns_of("first", "ada")
    assert history.turns_of("first", "agent 299")
    assert not history.turns_of("second", "")
    for number in range(300):
        history.began(f"n{number}", "ada", pb.Started())
    assert not history.turns_of("first", "agent 299")


async def test_a_move_is_shown_by_its_bytes() -> None:
    async def steps() -> AsyncIterator[cachestore_pb2.MoveAgentResponse]:
        yield cachestore_pb2.MoveAgentResponse(waiting={"lease_owner": "engine"})
        yield cachestore_pb2.MoveAgentResponse(progress={"bytes_done": 512, "bytes_total": 2048})
        yield cachestore_pb2.MoveAgentResponse(done={})

    waiting, half, done = [each async for each in _progress(steps(), "studio")]
    assert "its end is waited for" in waiting
    assert half == 'event: moving\ndata: {"done":512,"total":2048,"words":"512 bytes of 2.0 KiB"}\n\n'
    assert done == 'event: moved\ndata: {"words":"It has moved to studio."}\n\n'


def test_a_prompts_text_is_shown_with_its_last_token_which_has_no_kv() -> None:
    memory = SyntheticAgent(SMALL, 1).turn(300).manifest
    assert not memory.messages
    memory.pending.id, memory.pending.text = 7, "the end"
    shown = _read(cachestore_pb2.SnapshotVersion(), memory.SerializeToString(deterministic=True))
    assert shown.text == memory.text + "the end"


def test_days_are_named_as_people_name_them() -> None:
    today = datetime(2026, 11, 26, 1, tzinfo=timezone(timedelta(hours=1)))
    found = [
        day_of(today.astimezone(UTC) - timedelta(hours=hours), today) for hours in (0, 2, 26, 24 * 6, 24 * 7, 24 * 40)
    ]
    assert found == ["Today", "Yesterday", "Tuesday", "Friday", "November 2026", "October 2026"]


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("My name\n is Anna.", "My name is Anna."),
        ("<env>date</env> <x-y>z</x-y>\nFix it", "Fix it"),
        ("<env>only</env>", "<env>only</env>"),
        ("<env>not closed", "<env>not closed"),
        ("a\u202eb\x00c", "a b c"),
        ("word " * 40, "word word word word word word word word word word word…"),
        ("x" * 100, "x" * 59 + "…"),
        (" \n", ""),
    ],
)
def test_a_title_is_a_line_of_the_first_words(text: str, title: str) -> None:
    assert first_words(text) == title
    assert title_of([Said("system", "Be brief."), Said("user", text), Said("user", "Later.")]) == (title or "Later.")


def test_the_hours_speed_is_the_middle_and_nineteen_of_twenty_of_its_turns() -> None:
    clock = Clock()
    history = History(clock)
    assert history.speed("first") is None
    history.ended("first", pb.Finished())  # sent again: it has no times
    for number in range(101):
        times = pb.Timings(first_token={"nanos": (number + 1) * 1_000_000}, decode={"seconds": 2})
        history.ended("first", pb.Finished(usage={"completion_tokens": 2 * number}, timings=times))
    assert history.speed("first") == Speed(101, 51, 96, 50)
    assert history.speed("second") is None
    for number in range(10):
        times = pb.Timings(first_token={"nanos": (number + 1) * 1_000_000})
        history.ended("few", pb.Finished(timings=times))
    assert history.speed("few") == Speed(10, 5, 10, 0), "within 9 ms were only nine of ten"
    clock.now_s += 60 * MINUTES
    assert history.speed("first") is None


NODE = shutil.which("node")
READS_EVENTS = """
import { eventsOf } from "./events.mjs";
delete ReadableStream.prototype[Symbol.asyncIterator]; // as in a Safari
delete ReadableStream.prototype.values;
const pieces = ["event: delta\\nda", 'ta: {"text": "caf\u00e9"}\\n\\nevent: ended\\n', "data: 1\\n\\n", "event: c"];
const left = [];
const body = () => new ReadableStream({
  pull(stream) { pieces.length ? stream.enqueue(new TextEncoder().encode(pieces.shift())) : stream.close(); },
  cancel() { left.push("cancelled"); },
}, { highWaterMark: 0 });
const all = [];
for await (const event of eventsOf({ body: body() })) all.push(event);
pieces.push('event: refused\\ndata: {}\\n\\n', "never read", "nor this", "nor that");
for await (const _ of eventsOf({ body: body() })) break;
await new Promise((done) => setTimeout(done, 10));
console.log(JSON.stringify([all, left]));
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node.js here")
def test_the_pages_script_reads_events_where_streams_cannot_be_looped_over(tmp_path: Path) -> None:
    (tmp_path / "events.mjs").write_bytes((ASSETS / "events.js").read_bytes())
    (tmp_path / "reads.mjs").write_text(READS_EVENTS)
    read = subprocess.run([str(NODE), "reads.mjs"], cwd=tmp_path, stdout=subprocess.PIPE, check=True, timeout=60)
    assert json.loads(read.stdout) == [[["delta", {"text": "café"}], ["ended", 1]], ["cancelled"]]
