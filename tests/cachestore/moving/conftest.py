"""Two stores that the tests of moves share, with clients."""

from collections.abc import Iterator
from itertools import count

import pytest
from kvasir.clients import StoreClient

from tests.cachestore.moving.two_stores import Mac, macs

_NUMBERS = count(1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mac, Mac]]:
    with macs(tmp_path_factory.mktemp("m"), "--move-patience-s", "1") as (laptop, studio):
        laptop.start()
        studio.start()
        yield laptop, studio


@pytest.fixture
def laptop(pair: tuple[Mac, Mac]) -> Iterator[StoreClient]:
    with pair[0].client() as client:
        yield client


@pytest.fixture
def studio(pair: tuple[Mac, Mac]) -> Iterator[StoreClient]:
    with pair[1].client() as client:
        yield client


@pytest.fixture
def name() -> str:
    return f"ada{next(_NUMBERS)}"
