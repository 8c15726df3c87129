"""A start that sets aside what it finds at a place that nobody knows ends at each request to the bucket, while another
process begins the namespace at each request before that: what that one acknowledged is there after the next start, or
after this one if it does not end early."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kvasir.errors import DataLoss
from obstore.store import MemoryStore

from tests.cachestore.bucket.test_two_writers import WHERE, Died, HeldBucket, Pair, _pair
from tests.cachestore.core.lab import NS, Lab, assert_restores, publish
from tests.made_models.sampling import sampled
from tests.made_models.synthetic import SyntheticAgent, SyntheticSnapshot

_SOME, _FEW = sampled(8, of=1), 96  # every so many


@dataclass
class Script:
    """What happens before and behind which request of a start."""

    dies_at: int = 0
    begins_at: int = 0
    count: int = 0
    is_start: bool = False
    begin: list[object] = field(default_factory=list)

    @contextmanager
    def request(self) -> Iterator[None]:
        if not self.is_start:
            yield
            return
        self._moment()
        yield
        self._moment()

    def _moment(self) -> None:
        self.count += 1
        if self.count == self.begins_at:
            self.is_start = False
            self.begin.pop()()  # type: ignore[operator]
            self.is_start = True
        if self.count == self.dies_at:
            raise Died


class ScriptedBucket(HeldBucket):
    script: Script

    @contextmanager
    def _in_words(self, name: str) -> Iterator[None]:
        with self.script.request(), super()._in_words(name):
            yield


def start(pair: Pair, script: Script, dies_at: int = 0, begins_at: int = 0) -> int:
    """A start that ends so. How many moments it had."""
    script.dies_at, script.begins_at, script.count, script.is_start = dies_at, begins_at, 0, True
    try:
        with suppress(Died):
            pair.start_another()
    finally:
        script.is_start = False
    return script.count


@contextmanager
def opened(root: Path, turn: SyntheticSnapshot) -> Iterator[tuple[Pair, Script]]:
    """Objects of an agent lie there, and no row."""
    bucket, script = ScriptedBucket(MemoryStore(), WHERE), Script()
    bucket.script = script
    with _pair(Lab(root / "first"), bucket) as pair:
        place = pair.first._core.blobs.of(NS).place
        for digest, data in list(turn.new_blobs.items())[:2]:
            bucket.put(f"{place}/{digest.hash}", data)
        yield pair, script


def moments(root: Path, turn: SyntheticSnapshot) -> int:
    with opened(root, turn) as (pair, script):
        return start(pair, script)


@pytest.mark.long(56)
@pytest.mark.parametrize("reads", [False, True])
def test_a_start_that_ends_anywhere_loses_nothing_of_a_namespace_that_begins_meanwhile(
    memory_directory: Path, *, reads: bool
) -> None:
    end_starts(memory_directory / f"reads {reads}", every=_SOME, reads=reads)


@pytest.mark.long(6)
@pytest.mark.parametrize("reads", [False, True])
def test_a_start_that_ends_at_some_requests_loses_nothing_either(memory_directory: Path, *, reads: bool) -> None:
    end_starts(memory_directory / f"few, reads {reads}", every=_FEW, reads=reads)


def end_starts(root: Path, every: int, *, reads: bool) -> None:
    """Starts that end at each request, or at every so many, of a namespace's begin at each request before."""
    turn = SyntheticAgent(seed=1).turn(600)
    count = moments(root / "counted", turn)
    assert count > 20
    for begins_at in range(1, count + 1):
        for dies_at in range(begins_at + begins_at % every, count + 20, every):
            with opened(root / f"{begins_at} {dies_at}", turn) as (pair, script):
                script.begin.append(lambda pair=pair: publish(pair.second, "ada", turn, 0))
                is_alive = start(pair, script, dies_at, begins_at) < dies_at
                made = pair.first.snapshots.get(NS, "ada")
                if reads:
                    for digest in turn.digests:
                        with suppress(DataLoss):
                            pair.first.blobs.read(NS, digest)
                if not is_alive:
                    start(pair, script)
                try:
                    assert_restores(pair.first, made, turn)
                    assert pair.first.care.check(repair=False).is_clean
                except BaseException as error:
                    error.add_note(f"begun at {begins_at}, ended at {dies_at} of {count}")
                    raise
