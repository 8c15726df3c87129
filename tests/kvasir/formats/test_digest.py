"""Digests are checked however they are made, and equal ones are one in a set."""

import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.digest import Digest

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
