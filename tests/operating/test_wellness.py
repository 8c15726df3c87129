"""Each service says on /healthz whether it is well, and if not, why: killed, hung and full are told apart."""

import os
import signal
import time
from pathlib import Path

import pytest
from kvasir.cli.caller import Caller
from kvasir.cli.doctor import service_problems
from kvasir.cli.running.group import service_states
from kvasir.cli.running.home import Home

from tests.cli.running import in_process
from tests.operating.conftest import Watched
from tests.running.scraping import health
from tests.running.waiting import eventually


def test_all_are_well_at_first(watched: Watched) -> None:
    assert {name: watched.problems(name) for name in watched.ports} == {name: (200, []) for name in watched.ports}


def test_a_killed_store_turns_engine_and_gateway_unwell_and_back(watched: Watched) -> None:
    house = watched.front.house
    house.store.kill()
    assert watched.problems("engine") == (503, ["STORE_UNREACHABLE"])
    assert watched.problems("gateway") == (503, ["STORE_UNREACHABLE"])
    house.store.start()
    eventually(lambda: watched.problems("engine") == (200, []))
    eventually(lambda: watched.problems("gateway") == (200, []))


def test_each_service_reports_what_it_could_not_read_again(watched: Watched) -> None:
    house = watched.front.house
    file = house.root / "credentials.toml"
    pids = {"store": house.store.pid, "engine": house.engine.pid, "gateway": watched.front.gateway.pid}

    def all_say(problems: list[str]) -> bool:
        for pid in pids.values():
            os.kill(pid, signal.SIGHUP)
        time.sleep(0.1)
        said = [health(watched.ports[name])[1]["not_reloaded"] for name in pids]
        return said == [problems] * len(pids)

    right = file.read_text()
    try:
        file.write_text("[[credential")
        eventually(lambda: all_say(["credentials"]))
    finally:
        file.write_text(right)
    eventually(lambda: all_say([]))


@pytest.mark.long(8)
def test_a_hung_store_and_a_hung_engine_are_reported_by_those_who_ask_them(watched: Watched) -> None:
    house = watched.front.house
    house.store.freeze()
    try:  # a store that answered a moment ago is busy
        eventually(lambda: watched.problems("engine") == (503, ["STORE_UNREACHABLE"]))
    finally:
        house.store.thaw()
    eventually(lambda: watched.problems("engine") == (200, []))
    house.engine.freeze()
    try:
        assert watched.problems("gateway") == (503, ["ENGINE_HANGS"])
    finally:
        house.engine.thaw()
    eventually(lambda: watched.problems("gateway") == (200, []))


@pytest.mark.long(2)
def test_a_full_disk_and_memories_that_are_not_stored_are_reported(watched: Watched, tmp_path: Path) -> None:
    house = watched.front.house
    store, addresses = house.store, ("--address", house.store.address, "--engine", house.engine.address)
    command = ("--home", tmp_path, *addresses)
    in_process(*command, "chat", "ada", "--once", "Hello.")
    assert in_process(*command, "status").code == 0
    store.kill()
    store.options += ["--free-disk-reserve-bytes", str(1 << 60)]
    store.start()
    assert watched.problems("store") == (503, ["DISK_FULL"])
    eventually(lambda: watched.problems("engine") == (200, []))
    assert in_process(*command, "chat", "ada", "--once", "I like tea.").code == 1, "it was not stored"
    assert watched.problems("engine") == (200, ["MEMORIES_NOT_STORED"]), "a restart would lose them"
    assert watched.problems("gateway") == (200, ["MEMORIES_NOT_STORED"])
    status = in_process(*command, "status", "--json")
    problems = {row["name"]: "".join(row["problems"]) for row in status.value["services"]}
    assert (status.code, "DISK_FULL" in problems["store"], "in RAM alone" in problems["engine"]) == (1, True, True)
    caller = Caller(Home(tmp_path), house.store.address, house.engine.address)
    found = " ".join(service_problems(caller, service_states(caller)))
    assert ("DISK_FULL" in found, "MEMORIES_NOT_STORED" in found) == (True, True)
    store.kill()
    del store.options[-2:]
    store.start()
    assert watched.problems("store") == (200, [])
    eventually(lambda: watched.problems("engine") == (200, []))
    eventually(lambda: in_process(*command, "status").code == 0)


def test_an_engine_without_a_model_is_not_well(watched: Watched) -> None:
    with watched.front.house.client() as owner:
        owner.unload_model(drop_unstored=True)
        assert watched.problems("engine") == (503, ["MODEL_NOT_LOADED"])
        assert watched.problems("gateway") == (503, ["MODEL_NOT_LOADED"])
        owner.load_model("kvasir-tiny")
    assert watched.problems("engine") == (200, [])
    assert watched.problems("gateway") == (200, [])
