"""The power fails under the real service at work: what it acknowledged is there, and its directory looks not old."""

import os
import random
from pathlib import Path

import pytest

from tests.cachestore.service.powerless_store import cut_power
from tests.cachestore.service.running import assert_whole, publish, store_home
from tests.cachestore.service.test_kills import WRITERS, Writer, assert_clean, assert_nothing_lost, one_life
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import SMALL, SyntheticAgent

# Many homes of few lives each: a home's lives grow with its data, and homes can run beside each other.
HOMES, CUTS = sampled(1, of=20), sampled(3, of=10)
SEED = int(os.environ.get("KVASIR_SEED", "1"))


def test_an_acknowledged_version_outlives_a_power_cut(tmp_path: Path) -> None:
    with store_home(tmp_path) as home:
        home.program = "powerless_store"
        running, turn = home.start(), SyntheticAgent(SMALL, SEED).turn(300)
        with running.client() as client:
            publish(client, "ada", turn, 0)
        running.kill()
        assert cut_power(home, "lost", random.Random(SEED)), "nothing was written down: nothing can be lost"
        assert_clean(home)
        with home.start().client() as client:
            assert_whole(client, "ada", turn)


@pytest.mark.long(4)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(SEED, SEED + HOMES))
def test_what_was_acknowledged_outlives_power_cuts(tmp_path: Path, seed: int) -> None:
    writers = [Writer(number) for number in range(WRITERS)]
    source = random.Random(seed)
    with store_home(tmp_path) as home:
        home.program = "powerless_store"
        for cut in range(CUTS + 1):
            running = home.start("--retained-versions", "1000")
            count = assert_nothing_lost(running, writers)
            if cut < CUTS:
                one_life(running, writers, source)
                cut_power(home, source.choice(("lost", "kept", "mixed")), source)
                assert_clean(home)
    print(f"{CUTS} cuts, seed {seed}, {count} acknowledged versions")
    assert count > CUTS
