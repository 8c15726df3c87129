"""How a text's hidden rows become one vector."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Vector = tuple[float, ...]


class Pooling(Enum):
    MEAN = "mean"  # all of them, alike
    LAST = "last"
    FIRST = "cls"  # the token that an encoder puts before a text


def of_length_one(values: Sequence[float] | NDArray[np.float32]) -> Vector:
    """The vector in the same direction; zero stays zero."""
    vector = np.asarray(values, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    return tuple((vector / length if length else vector).astype(np.float32).tolist())


def shortened(vector: Vector, dimensions: int) -> Vector:
    return vector if dimensions == len(vector) else of_length_one(vector[:dimensions])


@dataclass(frozen=True, slots=True)
class Embedded:
    vector: Vector
    tokens: int
