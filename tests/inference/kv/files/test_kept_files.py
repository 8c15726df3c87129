"""Files of a user's cache are believed where they are whole and nobody else can write them."""

import os
from pathlib import Path

import pytest

from inference_svc.kv.kept_files import keep_bytes, kept_bytes, named_for

KEPT = b"what a start found out"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "kept" / "one"
    keep_bytes(path, KEPT)
    return path


def test_what_is_kept_comes_back(path: Path) -> None:
    assert kept_bytes(path) == KEPT
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert kept_bytes(path.with_name("another")) is None


def test_files_that_a_killed_writer_left_are_removed_after_an_hour(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(_: int) -> None:
        raise SystemExit

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", killed)
        for _ in range(2):
            with pytest.raises(SystemExit):
                keep_bytes(path, b"of others")
    left, young = (each for each in path.parent.iterdir() if each != path)
    os.utime(left, (0, left.stat().st_mtime - 3700))
    keep_bytes(path.with_name("another"), KEPT)
    assert sorted(path.parent.iterdir()) == sorted([path, path.with_name("another"), young])


def test_no_damage_is_believed(path: Path) -> None:
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(bytes(byte ^ (at == place) for at, byte in enumerate(whole)))
        assert kept_bytes(path) is None
        path.write_bytes(whole[:place])
        assert kept_bytes(path) is None
    path.write_bytes(whole)
    assert kept_bytes(path) == KEPT


def test_a_folder_that_others_write_to_gives_and_takes_nothing(path: Path) -> None:
    for mode in (0o770, 0o707):
        path.parent.chmod(mode)
        assert kept_bytes(path) is None
        keep_bytes(path.with_name("another"), KEPT)
        assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("is_linked", [False, True])
def test_a_folder_that_everybody_may_replace_gives_and_takes_nothing(path: Path, is_linked: bool) -> None:
    above = path.parent.parent
    if is_linked:
        above = above / "shared"
        above.mkdir()
        (above / "link").symlink_to(path.parent)
        path = above / "link" / path.name
    for mode, gives in ((0o777, None), (0o1777, KEPT), (0o775, KEPT), (0o703, None), (0o700, KEPT)):
        above.chmod(mode)
        assert kept_bytes(path) == gives
        keep_bytes(path.with_name("another"), KEPT)
        assert path.with_name("another").exists() == (gives is not None)
        path.with_name("another").unlink(missing_ok=True)


def test_a_folder_of_another_user_gives_and_takes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: path.stat().st_uid + 1)
    assert kept_bytes(path) is None
    keep_bytes(path.with_name("another"), KEPT)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_other_conditions_have_another_name() -> None:
    assert len({named_for("a", "b"), named_for("ab"), named_for("a", "b", ""), named_for("b", "a")}) == 4
