"""A proof waits for battery and heat, and keeps the machine awake."""

import os
from pathlib import Path

import pytest
from kvasir_bench.prove.power import Power, kept_awake, wait_until_well

from tests.running.waiting import eventually


def linux(folder: Path, *, status: str = "Discharging", capacity: int = 20, scope: str = "", count: int = 3) -> Power:
    battery = folder / "class/power_supply/BAT0"
    heat = folder / "devices/system/cpu/cpu0/thermal_throttle"
    for each in (battery, heat):
        each.mkdir(parents=True, exist_ok=True)
    for name, text in (("type", "Battery"), ("status", status), ("capacity", str(capacity)), ("scope", scope)):
        (battery / name).write_text(f"{text}\n")
    (heat / "core_throttle_count").write_text(f"{count}\n")
    return Power("linux", folder)


def test_on_linux_a_low_battery_that_discharges_is_a_reason_to_wait(tmp_path: Path) -> None:
    assert "at 20 %" in linux(tmp_path).reason_to_wait()
    for known in ({"status": "Charging"}, {"capacity": 30}, {"scope": "Device"}):
        assert linux(tmp_path, **known).reason_to_wait() == ""  # type: ignore[arg-type]
    assert Power("linux", tmp_path / "nothing").reason_to_wait() == ""


def test_on_linux_a_throttle_counter_that_rises_is_a_reason_until_it_stands(tmp_path: Path) -> None:
    power = linux(tmp_path, status="Full")
    assert power.reason_to_wait() == ""
    linux(tmp_path, status="Full", count=5)
    assert "hot" in power.reason_to_wait()
    assert power.reason_to_wait() == ""


COOL = "Note: No thermal warning level has been recorded\nNote: No performance warning level has been recorded\n"
LIMITS = "CPU Power notify\n\tCPU_Scheduler_Limit \t= 100\n\tCPU_Available_CPUs \t= 8\n\tCPU_Speed_Limit \t= {}\n"
NOW = "Now drawing from 'Battery Power'\n"
BATTERY = NOW + " -InternalBattery-0 (id=4653155)\t{}%; discharging; 3:12 remaining present: true\n"
MAINS = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=4653155)\t12%; charging; 1:10 remaining present: true\n"


@pytest.mark.parametrize(
    ("battery", "heat", "reason"),
    [
        (BATTERY.format(12), COOL, "at 12 %"),
        (BATTERY.format(80), COOL, ""),
        (MAINS, COOL, ""),
        ("Now drawing from 'AC Power'\n", LIMITS.format(100), ""),
        ("", LIMITS.format(62), "hot"),
        ("", "Thermal Warning Level = 5\n", "hot"),
        ("", "Thermal Warning Level = 255\n", ""),
    ],
)
def test_on_a_mac_pmset_shows_battery_and_heat(
    battery: str, heat: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("batt", battery), ("therm", heat)):
        (tmp_path / name).write_text(text)
    program(tmp_path, "pmset", f'cat "{tmp_path}/$2"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = Power("darwin").reason_to_wait()
    assert reason in found
    assert bool(reason) == bool(found)


def program(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{line}\n")
    (folder / name).chmod(0o755)


def test_a_proof_waits_until_the_machine_is_well_and_reports_each_reason_once(tmp_path: Path) -> None:
    lines, sleeps = list[str](), list[float]()

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            linux(tmp_path, status="Charging")

    wait_until_well(linux(tmp_path), lines.append, sleep)
    assert (len(sleeps), len(lines)) == (3, 1)
    assert "the battery is at 20 %" in lines[0]


def test_a_mac_is_kept_awake_as_long_as_the_proof_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "caffeinate", f'echo "$@" > "{tmp_path}/given"; exec sleep 60')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with kept_awake():
        eventually(lambda: (tmp_path / "given").exists() and (tmp_path / "given").read_text() != "")
    assert (tmp_path / "given").read_text().split() == ["-i", "-w", str(os.getpid())]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with kept_awake():
        pass
