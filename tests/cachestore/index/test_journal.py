"""The journal: what is written is read back, what is damaged is seen, and writing it shorter changes nothing."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachestore_svc.blobs.disk import Disk
from cachestore_svc.journal import journal
from cachestore_svc.journal.journal import Journal
from cachestore_svc.journal.journal_lines import Position, begin, group_line, parse, state_lines
from cachestore_svc.journal.replay import Change, State, apply, changes_of, differences

KV = "ab" * 32

names = st.sampled_from(["ada", "bób", 'c"\n'])
spaces = st.sampled_from(["default", "other"])
numbers = st.integers(1, 4)
changes_ = st.one_of(
    st.tuples(st.just("agent"), spaces, names, st.sampled_from([0, 1]), st.none() | numbers, numbers),
    st.tuples(st.just("forget"), spaces, names),
    st.tuples(st.just("label"), spaces, names, st.sampled_from(["x", "y"]), st.none() | st.text(max_size=3)),
    st.tuples(
        *(st.just("version"), spaces, names, st.just(KV), numbers, numbers, st.just("cd" * 32), numbers),
        *(numbers, st.text(max_size=3), numbers, st.just("ef")),
    ),
    st.tuples(st.just("drop"), spaces, names, st.just(KV), numbers),
    st.tuples(st.just("brought"), spaces, st.sampled_from(["01" * 32, "02" * 32]), st.sampled_from([0, 1])),
).map(list)
groups = st.lists(st.lists(changes_, min_size=1, max_size=4), max_size=6)


def written(groups: list[list[Change]], store: str = "s") -> bytes:
    position = begin(store)
    lines = list(state_lines(store, position, {}))
    for group in groups:
        line, position = group_line(position, map(json.dumps, group))
        lines.append(line)
    return b"".join(lines)


def replayed(groups: list[list[Change]]) -> State:
    state: State = {}
    for change in (change for group in groups for change in group):
        apply(state, change)
    return state


@given(groups)
def test_what_is_written_is_read_back(groups: list[list[Change]]) -> None:
    parsed = parse(written(groups))
    assert (parsed.store, parsed.position.sequence, parsed.state) == ("s", len(groups), replayed(groups))
    assert (parsed.damaged_lines, parsed.torn_bytes) == (0, 0)
    if groups:
        assert parsed.last == groups[-1]
        assert parsed.before_last == parse(written(groups[:-1])).position


@given(groups)
def test_a_state_makes_the_changes_that_make_it(groups: list[list[Change]]) -> None:
    state = replayed(groups)
    again: State = {}
    for change in changes_of(state):
        apply(again, json.loads(json.dumps(change)))
    assert differences(state, again) == differences(again, state) == {}


@given(groups, groups)
def test_groups_behind_a_state_keep_their_checksums(before: list[list[Change]], after: list[list[Change]]) -> None:
    """So that the index, which holds the checksum of its last group, need not be told when a journal is shortened."""
    long = written([*before, *after])
    first = parse(written(before))
    short = b"".join(state_lines("s", first.position, first.state)) + long[len(written(before)) :]
    parsed = parse(short)
    assert parsed.damaged_lines == 0
    assert parsed.position == parse(long).position
    assert differences(parsed.state, parse(long).state) == {}


@given(groups, st.integers(min_value=0))
def test_a_journal_cut_anywhere_is_read_to_the_last_whole_group(groups: list[list[Change]], place: int) -> None:
    data = written(groups)
    cut = data[: place % len(data)]
    parsed = parse(cut)
    if parsed.is_readable:
        assert parsed.state == replayed(groups[: parsed.position.sequence])
        assert parsed.whole_bytes + parsed.torn_bytes == len(cut)
    else:
        assert len(cut) < data.index(b"\n") + 1


@given(groups.filter(bool), st.integers(min_value=0))
def test_no_flipped_bit_is_believed(groups: list[list[Change]], bit: int) -> None:
    data = bytearray(written(groups))
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    parsed = parse(bytes(data))
    assert parsed.damaged_lines or parsed.torn_bytes
    assert not parsed.is_readable or parsed.state == replayed(groups[: parsed.position.sequence])
    # Of what lies behind the damage nothing but what it hit, and the checksum that stood there, is lost.
    salvaged = parse(bytes(data), salvages=True)
    if salvaged.is_readable:
        assert salvaged.damaged_lines <= 2 or salvaged.torn_bytes


def test_a_journal_of_a_state_cut_inside_the_state_is_damaged() -> None:
    state = replayed([[["agent", "default", f"a{number}", 0, None, 1] for number in range(500)]])
    data = b"".join(state_lines("s", begin("s"), state))
    cut = data[: data.rindex(b"\n", 0, len(data) - 1) + 1]
    assert parse(data).is_state_whole
    assert not parse(cut).is_state_whole
    assert parse(cut).damaged_lines


class FailingDisk(Disk):
    """Fails at a chosen effect."""

    failing = ""

    def write(self, descriptor: int, data: bytes | memoryview) -> None:
        if self.failing == "write":
            super().write(descriptor, data[: len(data) // 2])
        self._fail("write")
        super().write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self._fail("fsync")
        super().fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        self._fail("rename")
        super().rename(source, target)

    def _fail(self, what: str) -> None:
        if self.failing == what:
            self.failing = ""
            raise OSError(errno.EIO, os.strerror(errno.EIO))


CHANGE: list[Any] = ["agent", "default", "a", 0, None, 1]


def opened(path: Path, disk: Disk) -> Journal:
    return Journal.begin(path, disk, "s", begin("s"), {})


@pytest.mark.parametrize("effect", ["write", "fsync"])
def test_a_group_that_could_not_be_written_leaves_no_trace(tmp_path: Path, effect: str) -> None:
    disk = FailingDisk()
    log = opened(tmp_path / "journal", disk)
    log.append([json.dumps(CHANGE)])
    log.keep()
    before = (tmp_path / "journal").read_bytes()
    disk.failing = effect
    with pytest.raises(OSError):
        log.append([json.dumps(CHANGE)])
    assert (tmp_path / "journal").read_bytes() == before
    log.append([json.dumps(CHANGE)])
    assert parse((tmp_path / "journal").read_bytes()).position == log.position


def test_a_group_whose_commit_failed_is_taken_back(tmp_path: Path) -> None:
    log = opened(tmp_path / "journal", Disk())
    before = (tmp_path / "journal").read_bytes(), log.position
    log.append([json.dumps(CHANGE)])
    log.take_back()
    assert ((tmp_path / "journal").read_bytes(), log.position) == before


def test_what_cannot_be_taken_back_stops_the_journal(tmp_path: Path) -> None:
    disk = FailingDisk()
    log = opened(tmp_path / "journal", disk)
    log.append([json.dumps(CHANGE)])
    disk.failing = "fsync"
    log.take_back()
    with pytest.raises(Exception, match="restart the store"):
        log.append([json.dumps(CHANGE)])


@pytest.mark.parametrize("effect", ["", "write", "fsync", "rename"])
def test_a_journal_is_shortened_or_stays_as_it_was(tmp_path: Path, effect: str) -> None:
    path, disk = tmp_path / "journal", FailingDisk()
    log = opened(path, disk)
    for number in range(20):
        log.append([json.dumps(["agent", "default", "a", 0, None, number])])
        log.keep()
    read_bytes = log.size_bytes
    log.append([json.dumps(["agent", "default", "b", 0, None, 1])])
    log.keep()
    whole = parse(path.read_bytes())
    first = log.shorter(read_bytes)
    disk.failing = effect
    if effect:
        with pytest.raises(OSError):
            log.shorten(first.state, first.position, read_bytes)
    else:
        log.shorten(first.state, first.position, read_bytes)
        assert log.size_bytes == path.stat().st_size < whole.whole_bytes
        log.append([json.dumps(["forget", "default", "a"])])
        assert parse(path.read_bytes()).position == log.position
        return
    found = journal.read(path, disk)
    assert found is not None
    assert (found.position, found.state) == (whole.position, whole.state)


def test_a_journal_that_is_cut_short_is_not_shortened_and_stops_nothing(tmp_path: Path) -> None:
    """The index thread read the rest of it for ever."""
    path = tmp_path / "journal"
    log = opened(path, Disk())
    log.append([json.dumps(CHANGE)])
    log.keep()
    first = log.shorter(log.size_bytes)
    os.truncate(path, 10)
    with pytest.raises(OSError, match="cut short"):
        log.shorten(first.state, first.position, 5)
    assert path.stat().st_size == 10


def test_what_is_no_file_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    found = journal.read(tmp_path / "journal", Disk())
    assert found is not None
    assert not found.is_readable
    assert journal.read(tmp_path / "nothing", Disk()) is None


def test_positions_report_how_far_two_histories_are_one(tmp_path: Path) -> None:
    assert begin("a") != begin("b")
    assert group_line(begin("a"), ["[]"])[1] != group_line(begin("a"), ["[1]"])[1]
    assert isinstance(begin("a"), Position)
