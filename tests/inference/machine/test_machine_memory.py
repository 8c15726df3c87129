"""Engines of one machine share its memory, and give it back: claims, budgets of Macs of several sizes, and pressure."""

import asyncio
import contextlib
import fcntl
import os
import subprocess
import sys
import weakref
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition
from structlog.testing import capture_logs

from inference_svc.kv.pages.pool import IDLE_BYTES
from inference_svc.kv.policy import Rung, policy_of
from inference_svc.machine import pressure
from inference_svc.machine.claims import Claims
from inference_svc.machine.giving_back import GivingBack
from inference_svc.machine.kv_budget import GIB, Device, KvBudget, NoRoom, claims_of_device, held_of, weights_on_disk
from inference_svc.model import device_memory, kvasir_tiny
from inference_svc.model.probing.real_layouts import REAL_LAYOUTS, agent_bytes

# What Metal recommends of a Mac's RAM.
MACS = {8: 5.33, 16: 10.67, 64: 48.0}
IDENTITY = identity_pb2.KvIdentity(layers=REAL_LAYOUTS["Llama 3.1 8B"], policy=policy_of(Rung.Q4, "bfloat16"))


def model(weights_gib: float, context_tokens: int = 131_072) -> Any:
    return SimpleNamespace(kv_identity=IDENTITY, context_tokens=context_tokens, weights_bytes=int(weights_gib * GIB))


@pytest.mark.parametrize("ram_gib", MACS)
def test_two_engines_of_a_mac_stay_within_what_metal_recommends_beside_computing(ram_gib: int, tmp_path: Path) -> None:
    total, info = int(MACS[ram_gib] * GIB), model(1.0)
    taken = 0
    for _ in range(2):
        budget = KvBudget(Claims(tmp_path), total, None, info.weights_bytes).of(info)
        assert budget >= agent_bytes(IDENTITY, 1024)
        taken += budget + info.weights_bytes
    assert taken <= total * 7 // 8


def test_a_model_that_leaves_no_room_is_refused_with_numbers() -> None:
    with pytest.raises(NoRoom, match=r"weights have 4\.70 GiB .* has 5\.33 GiB in all, an eighth"):
        Device(int(5.33 * GIB)).auto_kv_bytes(model(4.7))
    with pytest.raises(NoRoom, match=r"of which other engines here claim 4\.00"):
        Device(int(5.33 * GIB), 4 * GIB).auto_kv_bytes(model(1.0))


def test_memory_that_other_programs_hold_of_a_card_counts_as_other_engines_claims_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that has taken what it claims is not counted twice."""
    claimed, held, both = (
        Device(64 * GIB, 20 * GIB),
        Device(64 * GIB, 0, 20 * GIB),
        Device(64 * GIB, 15 * GIB, 20 * GIB),
    )
    info = model(16)
    assert claimed.most_kv_bytes(info) == held.most_kv_bytes(info) == both.most_kv_bytes(info) == 20 * GIB
    assert claimed.auto_kv_bytes(info) == held.auto_kv_bytes(info) == 10 * GIB
    assert (claimed.left_bytes, held.left_bytes) == (44 * GIB, 43 * GIB), "a prompt's cell needs some of a card"
    facts = {"uuid": "GPU-1", "total_memory": 64 * GIB, "free_memory": 44 * GIB}
    monkeypatch.setattr("mlx.core.device_info", lambda: facts)
    monkeypatch.setattr("mlx.core.get_active_memory", lambda: 3 * GIB)
    monkeypatch.setattr("mlx.core.get_cache_memory", lambda: GIB)
    assert held_of(64 * GIB) == 16 * GIB, "without its own"
    assert (held_of(60 * GIB), held_of(32 * GIB)) == (12 * GIB, 0), "of the part that --device-gib names"


@pytest.mark.parametrize("has_context", [False, True])
@pytest.mark.parametrize("is_integrated", [False, True])
def test_a_device_that_has_the_machines_memory_is_no_card_that_others_fill(
    monkeypatch: pytest.MonkeyPatch, *, is_integrated: bool, has_context: bool
) -> None:
    """Files that the system keeps in RAM do not count as free, and make room."""

    def attribute(value: Any, name: int, _device: Any) -> int:
        value._obj.value = int(is_integrated and name == 18)
        return 0

    driver = SimpleNamespace(
        cuInit=lambda _: 0,
        cuCtxGetDevice=lambda _: 0 if has_context else 201,
        cuDeviceGet=lambda *_: 0,
        cuDeviceGetAttribute=attribute,
    )
    monkeypatch.setattr("ctypes.CDLL", lambda _: driver)
    monkeypatch.setattr("mlx.core.device_info", lambda: {"uuid": "1", "total_memory": 64 * GIB, "free_memory": GIB})
    device_memory._is_integrated.cache_clear()
    try:
        assert (held_of(64 * GIB) == 0) is is_integrated
    finally:
        device_memory._is_integrated.cache_clear()


def test_a_short_context_needs_less_than_half_of_a_large_machine() -> None:
    assert Device(1 << 40).auto_kv_bytes(model(1.0, 8192)) == 64 * agent_bytes(IDENTITY, 8192)


def test_a_size_that_others_leave_no_room_for_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with closing(Claims(tmp_path)) as first:
        first_budget = KvBudget(first, 10 * GIB, 6 * GIB, GIB)
        first_budget.of(model(1.0))
        with closing(Claims(tmp_path)) as second:
            with pytest.raises(NoRoom, match=r"--memory-gib 4: .*10\.00 GiB, of which other engines here claim 7\.00"):
                KvBudget(second, 10 * GIB, 4 * GIB, 0)
            with pytest.raises(NoRoom, match="--memory-gib 1000000: "):
                KvBudget(second, 10 * GIB, 1_000_000 * GIB, 0)
            with pytest.raises(NoRoom, match=r"weights take 3\.50, and"):
                KvBudget(second, 10 * GIB, None, int(3.5 * GIB))
            assert KvBudget(second, 10 * GIB, 3 * GIB, 0).of(model(0.0)) == 3 * GIB
            assert first.of_others() == 3 * GIB
            first_budget.model_is_gone()
            assert second.of_others() == 0
            second.claim(lambda _: 5 * GIB)
            with pytest.raises(NoRoom, match=r"--memory-gib 6: .* claim 5\.00; the weights take 1\.00"):
                first_budget.of(model(1.0))
            assert second.of_others() == 0
        assert first.of_others() == 0


def test_engines_on_two_cards_of_a_host_and_one_in_its_ram_claim_each_its_own_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def engine_on(facts: dict[str, Any]) -> Claims:
        monkeypatch.setattr("mlx.core.device_info", lambda: facts)
        return claims_of_device()

    devices = [{"uuid": "GPU-1"}, {"uuid": "GPU-2"}, {"device_name": "a processor"}]
    with contextlib.ExitStack() as ends:
        engines = [ends.enter_context(closing(engine_on(facts))) for facts in devices]
        for size_gib, engine in enumerate(engines, start=1):
            engine.claim(lambda _, size_gib=size_gib: size_gib * GIB)
        assert [engine.of_others() for engine in engines] == [0, 0, 0]
        beside = [ends.enter_context(closing(engine_on(facts))) for facts in devices]
        assert [engine.of_others() for engine in beside] == [GIB, 2 * GIB, 3 * GIB]


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_claim_outlives_the_removal_of_old_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_removed: bool
) -> None:
    monkeypatch.setattr("inference_svc.machine.claims.WORK_S", 0.01)

    async def keep_for_a_while(claims: Claims) -> None:
        keeping = asyncio.create_task(claims.keep())
        await asyncio.sleep(0.5)
        keeping.cancel()

    directory = tmp_path / "claims"
    with closing(Claims(directory)) as mine:
        mine.claim(lambda _: 5)
        for file in directory.iterdir():
            os.utime(file, (0, 0))
            if is_removed:  # as a machine wakes that slept for days
                file.unlink()
        if is_removed:
            directory.rmdir()
        asyncio.run(keep_for_a_while(mine))
        with closing(Claims(directory)) as other:
            assert other.of_others() == 5
            assert mine._path.stat().st_mtime > 0
    with closing(Claims(directory)) as other:
        assert other.of_others() == 0


def test_a_claim_that_several_threads_make_again_is_one_and_goes_with_its_engine(tmp_path: Path) -> None:
    """A model is loaded just as the file is touched; and a thread that touches it may outlast the engine."""
    directory = tmp_path / "claims"
    claims = Claims(directory)
    claims.claim(lambda _: 5)
    for _ in range(20):
        claims._path.unlink()
        with ThreadPoolExecutor(8) as pool:
            for touched in [pool.submit(claims._touch) for _ in range(8)]:
                touched.result()
        assert len([*directory.iterdir()]) == 2, "the claim, and the lock"
    claims.close()
    with (tmp_path / "of another").open("w") as other:  # it may have the number of the claim's file
        with pytest.raises(OSError):
            claims._touch()
        other.write("is open")
    assert len([*directory.iterdir()]) == 1


def test_weights_of_a_model_that_is_swapped_in_are_claimed_before_they_are_loaded(tmp_path: Path) -> None:
    """Another engine that starts meanwhile finds them taken."""
    path, weights = str(kvasir_tiny.path()), weights_on_disk([str(kvasir_tiny.path())])
    with closing(Claims(tmp_path)) as mine, closing(Claims(tmp_path)) as other:
        budget, seen = KvBudget(mine, GIB, 1 << 20, 0), list[int]()

        def opened(path: str, *, memory_budget_bytes: Any, name: str) -> str:
            seen.append(other.of_others())
            return f"{name} of {Path(path).name} with {memory_budget_bytes(model(0.5))}"

        budget.model_is_gone()
        assert budget.opener(opened)(path, name="tiny") == f"tiny of weights with {1 << 20}"
        assert seen == [weights + (1 << 20)]
        budget.model_is_gone()
        other.claim(lambda _: GIB - weights)
        with pytest.raises(NoRoom, match="--memory-gib"):
            budget.opener(opened)(path, name="tiny")
        assert (len(seen), other.of_others()) == (1, 0)


def test_weights_are_known_before_they_are_loaded_where_they_are_on_disk() -> None:
    assert weights_on_disk(["mlx-community/none"]) == 0
    assert 10e6 < weights_on_disk([str(kvasir_tiny.path()), "mlx-community/none"]) < 40e6


def test_a_claim_ends_with_its_process_however_it_ends(tmp_path: Path) -> None:
    code = "import os,sys; from inference_svc.machine.claims import Claims; from pathlib import Path\n"
    code += "Claims(Path(sys.argv[1])).claim(lambda others: others + 5); print(flush=True); sys.stdin.read()"
    with closing(Claims(tmp_path)) as mine:
        with subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as other:
            assert other.stdout is not None
            other.stdout.readline()
            assert mine.of_others() == 5
            other.kill()
        assert mine.of_others() == 0
        assert len(list(tmp_path.iterdir())) == 2, "its own, and the lock"


def test_no_other_user_reads_or_plants_claims(tmp_path: Path) -> None:
    Claims(tmp_path / "own").close()
    assert (tmp_path / "own").stat().st_mode & 0o077 == 0
    (tmp_path / "link").symlink_to(tmp_path / "own")
    with pytest.raises(FailedPrecondition, match="another user's; TMPDIR names another"):
        Claims(tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(FailedPrecondition, match="TMPDIR names another"):
        Claims(tmp_path / "file")


def test_the_claim_of_an_engine_that_begins_is_not_taken_for_one_that_was_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine, or the doctor, looks between the making of its file and its lock."""
    lock, looking = fcntl.flock, list[Thread]()

    def locked_late(file: Any, how: int) -> None:
        if isinstance(file, int) and how == fcntl.LOCK_EX and not looking:
            looking.append(Thread(target=mine.of_others))
            looking[0].start()
            looking[0].join(0.2)
        lock(file, how)

    with closing(Claims(tmp_path)) as mine:
        monkeypatch.setattr(fcntl, "flock", locked_late)
        with closing(Claims(tmp_path)) as other:
            looking[0].join()
            other.claim(lambda _: 5)
            assert mine.of_others() == 5


class PlayedEngine:
    memory_used_bytes, computed_tokens = 1000, 0

    def __init__(self) -> None:
        self.given: list[int] = []
        self.spared = 0

    def give_back(self, most_bytes: int, spared: Collection[object]) -> "Future[int]":
        self.given.append(most_bytes)
        self.spared = len(spared)
        done: Future[int] = Future()
        done.set_result(1)
        return done


def test_memory_goes_back_once_after_an_idle_time_and_by_halves_while_it_is_short() -> None:
    engine, now_s, is_idle, is_short = PlayedEngine(), 0.0, False, False
    giving = GivingBack(lambda: (engine, is_idle, ["woken"]), 600.0, lambda: is_short, lambda: now_s)

    def after(seconds: float) -> list[int]:
        nonlocal now_s
        now_s += seconds
        engine.given.clear()
        asyncio.run(giving.look())
        return list(engine.given)

    assert after(1000) == []  # a turn runs
    is_idle = True
    assert after(599) == []
    assert after(1) == [IDLE_BYTES]
    assert engine.spared == 1, "agents that may come stay"
    assert after(1000) == []
    engine.computed_tokens = 7  # a turn came and ended meanwhile
    assert after(1) == []
    assert after(599) == []
    assert after(1) == [IDLE_BYTES]
    is_idle, is_short = False, True
    assert after(5) == after(5) == [500]
    assert engine.spared == 0


def test_a_model_may_go_while_the_machine_is_looked_at() -> None:
    """A look at a busy machine takes its time: the next model was loaded beside the one that had gone."""
    engines, gone = [PlayedEngine()], list[bool]()
    one = weakref.ref(engines[0])

    def is_short() -> bool:
        engines.clear()
        gone.append(one() is None)
        return True

    giving = GivingBack(lambda: (engines[0], True, ()) if engines else None, 600.0, is_short, lambda: 0.0)
    asyncio.run(giving.look())
    assert gone == [True]


def test_memory_that_cannot_go_back_now_may_go_back_later() -> None:
    engine = PlayedEngine()
    refused: Future[int] = Future()
    refused.set_exception(RuntimeError("[malloc] Unable to allocate."))
    giving = GivingBack(lambda: (engine, False, ()), 600.0, lambda: True, lambda: 0.0)
    with pytest.MonkeyPatch.context() as patch, capture_logs() as logs:
        patch.setattr(engine, "give_back", lambda *_: refused)
        asyncio.run(giving.look())
    assert [line["event"] for line in logs] == ["kv.not_given_back"]
    asyncio.run(giving.look())
    assert engine.given == [500]


def test_linux_is_short_of_memory_where_hardly_any_is_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(pressure, "_MEMINFO", tmp_path / "meminfo")
    assert not pressure.is_short_of_memory(), "where the kernel does not report it"
    for available, is_short in ((5000, False), (300, True)):
        (tmp_path / "meminfo").write_text(f"MemTotal:  10000 kB\nHugePages_Total:\nMemAvailable: {available} kB\n")
        assert pressure.is_short_of_memory() is is_short


def test_a_container_is_short_of_memory_where_its_own_limit_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the host has; also by the limit of a group above. Cached files count as free."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(pressure, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(pressure, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(pressure, "_GROUPS", tmp_path / "groups")
    (tmp_path / "meminfo").write_text("MemTotal: 10000 kB\nMemAvailable: 9000 kB\n")
    assert not pressure.is_short_of_memory()
    (tmp_path / "own").write_text("4:memory:/old\n0::/pod/engine\n")
    assert not pressure.is_short_of_memory(), "no limit is to be read"

    def group(name: str, limit: str, used: int, cached: int) -> None:
        folder = tmp_path / "groups" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")

    group("pod/engine", "max", 990, 0)
    assert not pressure.is_short_of_memory()
    group("pod/engine", "1000", 970, 0)
    assert pressure.is_short_of_memory()
    group("pod/engine", "1000", 970, 500)
    assert not pressure.is_short_of_memory()
    group("pod", "2000", 1990, 0)
    assert pressure.is_short_of_memory()
