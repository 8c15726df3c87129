"""A simulated fleet: placement is the gateway's, sizes are the format's, and each number moves as it must."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvasir_bench.fleet import simulation
from kvasir_bench.fleet.report import lines
from kvasir_gateway.fleet.placing import Ring

from tests.cli.running import in_process
from tests.running.programs import run

_GIVEN: dict[str, Any] = json.loads(Path(simulation.__file__).with_name("assumptions.json").read_text())
_SMALL = _GIVEN | {"agents": 4000, "engines": 20, "hot_gib_of_engine": 8}


def _fleet(**changes: object) -> dict[str, Any]:
    found: dict[str, Any] = simulation.simulate(_SMALL | changes)["fleet"]
    return found


def _limit(part: str, **changes: object) -> float:
    [row] = [row for row in simulation.simulate(_SMALL | changes)["limits"] if row["part"] == part]
    return float(row["load"])


def test_a_token_of_llama_8b_takes_the_bytes_of_four_bits_and_their_scales() -> None:
    assert simulation.kv_bytes_of_token(_GIVEN["kv"]) == 32 * 2 * 8 * 128 * (4 + 32 / 64) / 8


def test_agents_belong_to_the_engines_of_the_gateways_ring() -> None:
    ring = Ring([f"engine-{number}" for number in range(7)])
    homes = simulation._homes(ring, 200, np.random.default_rng(3))
    points = np.random.default_rng(3).integers(1 << 64, size=200, dtype=np.uint64)
    assert [int(home) for home in homes] == [next(iter(ring.order(int(point)))) for point in points]


def test_more_ram_finds_more_memories_hot_and_enough_finds_all() -> None:
    shares = [_fleet(hot_gib_of_engine=gib)["turns_found_hot"] for gib in (1, 4, 16)]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1
    enough = _fleet(hot_gib_of_engine=10_000)
    assert enough["turns_found_hot"] == 1 - enough["turns_moved_by_load"]


def test_restores_are_the_turns_that_find_nothing_hot() -> None:
    found = _fleet()
    assert found["restores_of_day"] == pytest.approx((1 - found["turns_found_hot"]) * found["turns_of_day"])
    assert found["stored_bytes"] == pytest.approx(4000 * found["memory_mean_bytes"])
    assert found["memory_mean_bytes"] == pytest.approx(7590 * found["token_bytes"], rel=0.1)


def test_half_the_capacity_of_a_part_is_twice_its_load_and_the_worst_is_first() -> None:
    gives = _GIVEN["puts_per_s_of_prefix"]["value"]
    once, twice = _limit("writes under one prefix"), _limit("writes under one prefix", puts_per_s_of_prefix=gives / 2)
    assert twice == pytest.approx(2 * once)
    limits = simulation.simulate(_SMALL | {"commits_per_s_of_store": 0.001})["limits"]
    assert limits[0]["part"] == "commits of one store"
    assert limits[0]["load"] > 1


class _Noting(dict[str, Any]):
    """Notes which values were read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names = set[str]()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


def test_each_assumption_is_used_and_is_marked_as_assumed_unless_code_here_shows_it() -> None:
    given = _Noting(_SMALL)
    simulation.simulate(given)
    assert given.names == set(_GIVEN)
    root = Path(__file__).parents[3]
    for name, each in {**_GIVEN, **_GIVEN["prices"]}.items():
        if name not in ("agents", "engines", "kv", "prices"):
            source = each["source"].partition(":")[0]
            is_shown = any((root / below / source).exists() for below in ("", "clients/python"))
            assert is_shown or source.startswith("assumed"), name


def test_costs_follow_their_prices() -> None:
    prices = {name: each["value"] for name, each in _GIVEN["prices"].items()}
    costs = {row["cost"]: row["usd_a_month"] for row in simulation.simulate(_SMALL)["costs"]}
    dearer = simulation.simulate(_SMALL | {"prices": prices | {"moved_gb_usd": 0.09}})
    found = {row["cost"]: row["usd_a_month"] for row in dearer["costs"]}
    assert costs["engines"] == 20 * 24 * 30 * 2.5
    assert costs["bytes moved"] == 0
    assert found["bytes moved"] == pytest.approx(dearer["fleet"]["restored_bytes_of_day"] * 30 / 1e9 * 0.09)


@pytest.mark.long(4)
def test_the_command_names_the_part_that_breaks_first(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text('{"commits_per_s_of_store": 0.001}')
    small = ["bench", "fleet", "--simulate", "--agents", "2000", "--engines", "10", "--assumptions", str(own)]
    results = json.loads(run("kvasir", *small, "--json").stdout)
    assert (results["fleet"]["agents"], results["fleet"]["engines"]) == (2000, 10)
    assert "commits of one store: breaks first" in "\n".join(lines(results))
    own.write_text('{"commit": 1}')
    refused = run("kvasir", *small)
    assert refused.returncode != 0
    assert "'commit': expected one of" in refused.stderr
    own.write_text('{"puts_per_s_of_prefix": 0}')
    assert "--assumptions: " in run("kvasir", *small).stderr
    left_out = run("kvasir", "bench", "fleet")
    assert left_out.returncode != 0
    assert "--simulate" in left_out.stderr


def test_more_agents_than_this_machine_can_draw_are_refused_by_their_option(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(*_: Any) -> None:
        raise MemoryError("Unable to allocate 745 GiB")

    monkeypatch.setattr(simulation, "_lognormal", drawn)
    refused = in_process("bench", "fleet", "--simulate", "--agents", "100000000000")
    assert (refused.code, "--agents: too many for this machine's memory: Unable" in refused.err) == (2, True)
