"""A kept digest is checked behind the start, against the bytes."""

import json
import os
import shutil
from pathlib import Path

import structlog

from inference_svc.model.model_identity import kept_digest, weights_digest
from inference_svc.model.weights.digest_check import DigestCheck
from tests.inference.engine.families import LLAMA31, write_family


def checked(directory: Path, state: Path) -> list[str]:
    """The events that a check logs."""
    with structlog.testing.capture_logs() as logs:
        DigestCheck(directory, state, begins_after_s=0).wait()
    return [str(line["event"]) for line in logs]


def test_weights_that_changed_on_the_disk_are_reported_and_hashed_again(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    right = weights_digest(directory, tmp_path)
    assert checked(directory, tmp_path) == []
    [cache] = tmp_path.glob("*.json")
    cache.write_text(json.dumps(dict.fromkeys(json.loads(cache.read_text()), "0" * 64)))
    assert weights_digest(directory, tmp_path) != right, "a start believes what is kept"
    assert checked(directory, tmp_path) == ["weights.changed"]
    assert weights_digest(directory, tmp_path) == right


def test_weights_that_changed_behind_their_time_are_hashed_again(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    path = directory / "model.safetensors"
    before, times = weights_digest(directory, tmp_path), path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest(directory, tmp_path) != before


def test_a_file_that_was_replaced_is_not_called_changed(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    weights_digest(directory, tmp_path)
    (write_family(tmp_path / "other", LLAMA31, seed=5) / "model.safetensors").replace(directory / "model.safetensors")
    assert checked(directory, tmp_path) == []


def test_files_that_are_gone_end_the_check(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    weights_digest(directory, tmp_path)
    (directory / "model.safetensors").unlink()
    assert checked(directory, tmp_path) == []


def test_a_shard_counts_as_often_as_it_is_there_however_it_is_linked(tmp_path: Path) -> None:
    digests = []
    for name, copy in (("copied", shutil.copy), ("linked", os.link)):
        directory = write_family(tmp_path / name, LLAMA31)
        shards = [directory / f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
        (directory / "model.safetensors").rename(shards[0])
        copy(*shards)
        digests.append(weights_digest(directory, tmp_path))
    assert digests[0] == digests[1]


def test_a_check_that_has_not_begun_ends_at_once(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    check = DigestCheck(directory, tmp_path, begins_after_s=600)
    check.close()
    assert kept_digest(directory / "model.safetensors", tmp_path) is None
