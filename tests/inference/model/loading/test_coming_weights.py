"""Weights that are sent to a device before a model is there for them are the files' own bits, or are refused."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import mlx.core as mx
import numpy as np
import pytest
from kvasir.errors import FailedPrecondition

from inference_svc import first_model
from inference_svc.first_model import FirstModel
from inference_svc.kv.host_copies import from_files, host_copy
from inference_svc.kv.kept_files import KeptDirs
from inference_svc.model import kvasir_tiny, loading, model_identity
from inference_svc.model.model_identity import begin_digests, weights_digest
from inference_svc.model.weights import hashing, placing
from inference_svc.model.weights.placing import ComingWeights, place_weights
from inference_svc.model.weights.weight_files import weight_files
from tests.inference.engine.families import LLAMA31, write_family
from tests.inference.kv.attention.device.coming_files import PlayedDriver, play
from tests.running.waiting import eventually

SHAPES = {"a": (70, 90), "b": (3,), "c": (1,), "d": (0, 4), "e": (5000,)}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedDriver]:
    monkeypatch.setattr(host_copy, "_PIECE_BYTES", 1024)
    monkeypatch.setattr(from_files, "_LARGE_PIECE_BYTES", 4096)
    monkeypatch.setattr(first_model, "run_first_operations", lambda _: None)
    played = play(monkeypatch)
    yield played
    played.gate.set()


def written(directory: Path, seed: int = 0) -> dict[str, mx.array]:
    """Two files of tensors of all sizes of items, some of them at odd addresses."""
    mx.random.seed(seed)
    types = {"bf": mx.bfloat16, "f": mx.float32, "u1": mx.uint8, "u4": mx.uint32}
    every = {
        f"{kind}.{name}": mx.random.uniform(0, 200, shape).astype(dtype)
        for kind, dtype in types.items()
        for name, shape in SHAPES.items()
    }
    for number in (1, 2):
        mx.save_safetensors(
            str(directory / f"model-{number}.safetensors"),
            {name: each for place, (name, each) in enumerate(every.items()) if place % 2 == number - 1},
        )
    return every


def read(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found.update(mx.load(str(path)))  # type: ignore[arg-type]
    return found


def bits(array: mx.array) -> tuple[Any, ...]:
    return array.dtype, array.shape, np.array(array.reshape(-1).view(mx.uint8)).tobytes()


def test_weights_that_came_are_the_files(driver: PlayedDriver, tmp_path: Path) -> None:
    every, files = written(tmp_path), weight_files(tmp_path)
    coming, weights = ComingWeights(files), read(tmp_path)
    placed = place_weights(files, weights, coming=coming)
    assert {name: bits(each) for name, each in weights.items()} == {name: bits(each) for name, each in every.items()}
    odd = sum(each.nbytes for each in every.values() if each.nbytes % 2)
    assert (placed.sent_bytes, placed.read_bytes) == (sum(each.nbytes for each in every.values()) - odd, odd)
    assert driver.copies > len(every), "larger tensors went in pieces"


def test_a_file_that_the_system_reads_in_parts_comes_whole(
    driver: PlayedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, preadv = written(tmp_path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, rooms, at: preadv(file, [rooms[0][:1000]], at))
    weights = read(tmp_path)
    ComingWeights(weight_files(tmp_path)).give(weights)
    assert bits(weights["f.e"]) == bits(every["f.e"])


def test_files_are_open_until_all_has_come(
    driver: PlayedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    parts, begin = list[from_files.FilePart](), from_files.begin_from_files

    def begun(given: list[from_files.FilePart]) -> Any:
        parts.extend(given)
        return begin(given)

    monkeypatch.setattr(placing, "begin_from_files", begun)
    coming = ComingWeights(weight_files(tmp_path))
    assert not any(part.file.closed for part in parts)
    coming.give({})
    assert all(part.file.closed for part in parts)
    assert len(parts) > 9


def test_nothing_is_given_before_all_has_come(driver: PlayedDriver, tmp_path: Path) -> None:
    every, files = written(tmp_path), weight_files(tmp_path)
    driver.gate.clear()
    coming, weights = ComingWeights(files), read(tmp_path)
    opening = threading.Timer(0.2, driver.gate.set)
    opening.start()
    coming.give(weights)
    assert driver.gate.is_set()
    opening.join()
    assert bits(weights["bf.a"]) == bits(every["bf.a"])


def test_a_file_that_was_replaced_since_its_header_was_read_is_not_sent(driver: PlayedDriver, tmp_path: Path) -> None:
    written(tmp_path)
    files = weight_files(tmp_path)
    (tmp_path / "other").mkdir()
    others = written(tmp_path / "other", seed=1)
    (tmp_path / "other" / "model-1.safetensors").replace(tmp_path / "model-1.safetensors")
    coming, weights = ComingWeights(files), read(tmp_path)
    coming.give(weights)
    assert bits(weights["bf.a"]) == bits(others["bf.a"]), "as MLX reads it"


def test_a_file_that_is_cut_short_while_it_is_sent_is_refused(driver: PlayedDriver, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    [file] = files = weight_files(directory)
    driver.gate.clear()
    copies = host_copy._copiers()._threads
    held = [copies.submit(driver.gate.wait, 60) for _ in range(host_copy._THREADS)]
    coming = ComingWeights(files)
    os.truncate(file.path, file.size_bytes // 2)
    driver.gate.set()
    with pytest.raises(RuntimeError, match="cut short"):
        coming.give({})
    assert all(each.result() for each in held)


def test_a_start_sends_its_weights_ahead_and_replies_as_ever(driver: PlayedDriver, tmp_path: Path) -> None:
    with FirstModel(["--model", str(kvasir_tiny.path()), "--state-dir", str(tmp_path)]) as first:
        options = {"cache_dir": tmp_path, "memory_budget_bytes": 1 << 24}
        with closing(first.open_engine(str(kvasir_tiny.path()), **options)) as engine:
            assert "sent" in engine.model.weights_placement or driver.copies
            assert engine.model.kv_identity.weights_digest == weights_digest(kvasir_tiny.path(), tmp_path / "other")


def test_digests_of_weights_that_are_sent_ahead_are_made_ahead_and_once(
    driver: PlayedDriver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[str]()
    for module in (first_model, loading):
        begin = partial(lambda name, *given: (begun.append(name), begin_digests(*given))[1], module.__name__)
        monkeypatch.setattr(module, "begin_digests", begin)
    with FirstModel(["--model", str(kvasir_tiny.path()), "--state-dir", str(tmp_path)]) as first:
        options = {"cache_dir": tmp_path, "memory_budget_bytes": 1 << 24}
        first.open_engine(str(kvasir_tiny.path()), **options).close()
    assert begun == [first_model.__name__]


def test_weights_begin_before_the_modules_that_load_a_model() -> None:
    program = (
        "import sys, inference_svc.first_model\n"
        "print([m for m in ('transformers', 'mlx_lm', 'llguidance', 'grpc', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_each_file_is_hashed_once_beside_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed, hash_file = list[Path](), model_identity._file_digest

    def counted(path: Path, identity: str) -> str:
        hashed.append(path)
        return hash_file(path, identity)

    monkeypatch.setattr(model_identity, "_file_digest", counted)
    directory = write_family(tmp_path / "model", LLAMA31)
    loaded = loading.load(directory, None, kept=KeptDirs(tmp_path))
    assert loaded.digests is not None
    made = loaded.digests.result(60)
    assert weights_digest(directory, tmp_path, made) == weights_digest(directory, tmp_path / "other")
    assert len(hashed) == 2, "by the load, and by the other directory"


def test_a_file_that_changes_while_it_is_hashed_has_no_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else memories of other weights would be served under its name."""
    directory = write_family(tmp_path / "model", LLAMA31)
    [file] = files = weight_files(directory)
    other = write_family(tmp_path / "other", LLAMA31, seed=5) / "model.safetensors"
    hash_file = model_identity._file_digest

    def replaced(path: Path, identity: str) -> str:
        if other.exists():
            other.replace(path)
        return hash_file(path, identity)

    monkeypatch.setattr(model_identity, "_file_digest", replaced)
    assert begin_digests(files, tmp_path).result(60) == {}
    file.path.unlink()
    assert begin_digests(files, tmp_path).result(60) == {}


def test_a_file_that_was_away_while_its_name_was_hashed_keeps_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other weights had its name meanwhile, as links of a downloaded model have. Else it would be served under theirs,
    and their memories by it.
    """
    directory, other = (write_family(tmp_path / name, LLAMA31, seed=len(name)) for name in ("model", "other one"))
    right, path = weights_digest(directory, tmp_path / "apart"), directory / "model.safetensors"
    ours = path.rename(tmp_path / "ours")
    path.symlink_to(ours)
    digest_file, hash_file = model_identity._file_digest, model_identity.hash_of_file

    def lead_to(target: Path) -> None:
        (tmp_path / "link").symlink_to(target)
        (tmp_path / "link").replace(path)

    def replaced(path: Path, identity: str) -> str:
        lead_to(other / path.name)
        return digest_file(path, identity)

    def put_back(file: BinaryIO) -> str:
        digest = hash_file(file)
        lead_to(ours)
        return digest

    with monkeypatch.context() as patched:
        patched.setattr(model_identity, "_file_digest", replaced)
        check_refused_while(patched, put_back, directory, tmp_path)
    assert weights_digest(directory, tmp_path) == right


def test_a_file_that_had_other_bytes_while_it_was_hashed_keeps_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where they were put back, with their time."""
    directory = write_family(tmp_path / "model", LLAMA31)
    right, path = weights_digest(directory, tmp_path / "apart"), directory / "model.safetensors"
    content, hash_file = path.read_bytes(), model_identity.hash_of_file

    def write(content: bytes) -> None:
        times = path.stat()
        path.write_bytes(content)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def written(file: BinaryIO) -> str:
        write(content[:-1] + bytes([content[-1] ^ 1]))
        time.sleep(0.02)  # the clock of a file's times goes in steps
        digest = hash_file(file)
        write(content)
        return digest

    check_refused_while(monkeypatch, written, directory, tmp_path)
    assert weights_digest(directory, tmp_path) == right


def check_refused_while(
    monkeypatch: pytest.MonkeyPatch, hash_file: Callable[[BinaryIO], str], directory: Path, cache_dir: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(model_identity, "hash_of_file", hash_file)
        assert begin_digests(weight_files(directory), cache_dir).result(60) == {}
        with pytest.raises(FailedPrecondition, match="changed while they were read"):
            weights_digest(directory, cache_dir)


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    """A directory of two files of weights."""
    directory = write_family(tmp_path / "model", LLAMA31)
    other = write_family(tmp_path / "another", LLAMA31, seed=5)
    (other / "model.safetensors").rename(directory / "model-2.safetensors")
    return directory


def test_another_process_hashes_large_files_as_this_one_does(
    two_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = weights_digest(two_files, tmp_path / "other")
    monkeypatch.setattr(model_identity, "_LARGE_BYTES", 1)
    monkeypatch.setattr(model_identity, "_file_digest", lambda *_: pytest.fail("hashed here"))
    made = begin_digests(weight_files(two_files), tmp_path).result(60)
    assert weights_digest(two_files, tmp_path, made) == right


@pytest.mark.parametrize("program", ["", "print('0' * 63)", "import os, signal\nos.kill(os.getpid(), signal.SIGBUS)"])
@pytest.mark.parametrize("made_first", [True, False])
def test_files_that_the_other_process_did_not_come_to_are_hashed_here(
    program: str, made_first: bool, two_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = hashing._PROGRAM.replace("sys.argv[1:]", "sys.argv[1:2]") if made_first else ""
    monkeypatch.setattr(hashing, "_PROGRAM", f"{first}\n{program}")
    monkeypatch.setattr(model_identity, "_LARGE_BYTES", 1)
    here, hash_file = list[str](), model_identity._file_digest
    monkeypatch.setattr(model_identity, "_file_digest", lambda *of: (here.append(of[0].name), hash_file(*of))[1])
    files = weight_files(two_files)
    made = begin_digests(files, tmp_path).result(60)
    assert here == [file.path.name for file in files][made_first:]
    assert weights_digest(two_files, tmp_path, made) == weights_digest(two_files, tmp_path / "other")


def test_without_another_process_files_are_hashed_here(
    two_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no such program"))
    monkeypatch.setattr(model_identity, "_LARGE_BYTES", 1)
    assert len(begin_digests(weight_files(two_files), tmp_path).result(60)) == 2


_HASHES = '''
import sys
from inference_svc.model.weights import hashing

hashing._PROGRAM = f"""
import fcntl, os
held = open({sys.argv[2]!r}, 'w')
fcntl.flock(held, fcntl.LOCK_EX)
print(os.getpid(), file=held, flush=True)
{hashing._PROGRAM}"""
with open(sys.argv[1], "r+b", buffering=0) as file:
    hashing.hashes_apart([file])
'''


def test_a_process_that_hashes_ends_with_the_one_that_was_killed(tmp_path: Path) -> None:
    """Else it has the disk and all cores for as long as the weights take, beside the next start."""
    path, held = tmp_path / "weights", tmp_path / "held"
    os.mkfifo(path)  # whose bytes never come
    with subprocess.Popen([sys.executable, "-c", _HASHES, str(path), str(held)]) as process:
        while not (held.is_file() and held.read_text()):
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    try:
        with held.open() as file:
            eventually(lambda: is_locked(file))
    except AssertionError:
        os.kill(int(held.read_text()), signal.SIGKILL)
        raise


def is_locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_a_process_that_ends_while_it_hashes_reports_no_error(
    two_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported = list[object]()

    def at_the_end(*_: object) -> str:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    monkeypatch.setattr(threading, "excepthook", reported.append)
    monkeypatch.setattr(model_identity, "_file_digest", at_the_end)
    assert begin_digests(weight_files(two_files), tmp_path).result(60) == {}
    for thread in [each for each in threading.enumerate() if each.name == "weights-digest"]:
        thread.join()
    assert reported == []


def test_a_file_that_changes_while_another_process_hashes_it_has_no_digest(
    two_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, hashes = weight_files(two_files), model_identity.hashes_apart

    def written(opened: Sequence[BinaryIO]) -> list[str]:
        found = hashes(opened)
        time.sleep(0.02)  # the clock of a file's times goes in steps
        files[0].path.touch()
        return found

    monkeypatch.setattr(model_identity, "hashes_apart", written)
    monkeypatch.setattr(model_identity, "_LARGE_BYTES", 1)
    assert begin_digests(files, tmp_path).result(60).keys() == {files[1].identity}


@pytest.mark.parametrize("content", ["[" * 200_000, "[", "\xff"], ids=["deep", "cut", "no text"])
def test_digests_that_cannot_be_read_are_made_again(content: str, tmp_path: Path) -> None:
    directory = write_family(tmp_path / "model", LLAMA31)
    (tmp_path / "weights-digests.json").write_text(content, encoding="latin-1")
    [file] = files = weight_files(directory)
    made = begin_digests(files, tmp_path).result(60)
    assert [*made] == [file.identity]
    assert weights_digest(directory, tmp_path, made) == weights_digest(directory, tmp_path / "other")
