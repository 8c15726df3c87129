"""Two engines on one store, shared by the tests of this folder that kill nothing."""

from collections.abc import Callable, Iterator

import pytest

from tests.inference.handover.two_engines import TwoEngines, two_engines


@pytest.fixture(scope="session")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoEngines]:
    with two_engines(tmp_path_factory.mktemp("two")) as two:
        yield two


@pytest.fixture(scope="session")
def new_agent() -> Callable[[], str]:
    """Names that nobody used before."""
    numbers = iter(range(1_000_000))
    return lambda: f"agent {next(numbers)}"
