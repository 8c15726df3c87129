"""A store that has lived, and its directory as kill -9 left it."""

import pytest

from tests.cachestore.core.lab import Chance, Lab
from tests.cachestore.index.lives import Life


@pytest.fixture
def life(lab: Lab) -> Life:
    return Life(lab)


@pytest.fixture
def killed(life: Life) -> Lab:
    """The directory as kill -9 left it, everything in the log."""
    return Lab(life.root, chance=Chance(50))
