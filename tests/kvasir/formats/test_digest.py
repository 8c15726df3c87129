"""Digests are checked however they are made, and equal ones are one in a set."""

import subprocess
import sys
from pathlib import Path

import pytest
from blake3 import blake3
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest, hash_of_file

DIGESTS = [Digest.of(text) for text in (b"", b"a", b"bc")]
MESSAGES = [digest.to_proto() for digest in DIGESTS]
FIRST = DIGESTS[0].hash


def test_many_are_those_made_one_by_one() -> None:
    made = Digest.from_protos(MESSAGES)
    assert made == DIGESTS
    assert set(made) == set(DIGESTS)
    assert [hash(digest) for digest in made] == [hash(digest) for digest in DIGESTS]
    assert Digest.from_protos([]) == []
    with pytest.raises(AttributeError):
        made[0].size_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [FIRST.upper(), FIRST[:-1], f"{FIRST}0", FIRST[:-1] + "g", FIRST[:-2] + " 0", ""])
def test_one_that_is_wrong_is_found_among_many(wrong: str) -> None:
    with pytest.raises(ValueError, match="64 lower-case hex digits"):
        Digest.from_protos([*MESSAGES, manifest_pb2.Digest(hash=wrong), *MESSAGES])


def test_a_size_below_nothing_is_found_among_many() -> None:
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        Digest.from_protos([*MESSAGES, manifest_pb2.Digest(hash=FIRST, size_bytes=-1)])


def test_bytes_of_another_size_have_another_digest() -> None:
    assert Digest(FIRST, 1) != Digest(FIRST, 2)
    assert len({Digest(FIRST, 1), Digest(FIRST, 2), Digest(FIRST, 1)}) == 2


@pytest.mark.parametrize("size", [0, 1, (8 << 20) - 1, 8 << 20, (17 << 20) + 7])
def test_a_file_has_the_hash_of_its_bytes(size: int, tmp_path: Path) -> None:
    content = (bytes(range(1, 252)) * (size // 251 + 1))[:size]
    (tmp_path / "file").write_bytes(content)
    with (tmp_path / "file").open("rb", buffering=0) as file:
        assert hash_of_file(file) == blake3(content).hexdigest()


CUT_SHORT = """
import os, sys, threading, time
from pathlib import Path
from blake3 import blake3
from {module} import {name}

path = Path(sys.argv[1], "model.safetensors").resolve()
thread = threading.Thread(target=lambda: {call})

def is_used() -> bool:
    opened = [os.path.realpath(entry) for entry in Path("/proc/self/fd").iterdir()]
    return str(path) in opened or str(path) in Path("/proc/self/maps").read_text()

thread.start()
while thread.is_alive() and not is_used():
    pass
time.sleep(0.01)
os.truncate(path, 1)
thread.join()
print("lives")
"""


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("kvasir.store_for_mlx_lm.weights", "weights_of", "weights_of([sys.argv[1]])"),
        ("inference_svc.model.model_identity", "weights_digest", "weights_digest(path.parent, Path())"),
    ],
)
def test_a_file_that_is_cut_short_while_it_is_hashed_ends_no_process(
    module: str, name: str, call: str, tmp_path: Path
) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(4 << 30)
    program = CUT_SHORT.format(module=module, name=name, call=call)
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr
