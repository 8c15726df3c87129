"""The hidden rows of one text, taken in cell after cell: nothing but their sum, or the last, is kept."""

import mlx.core as mx
import numpy as np
from kvasir.errors import Internal

from inference_svc.model.embedding.pooling import Pooling, Vector, of_length_one


class HiddenRows:
    """On the MLX thread. Sums in 32 bits, in the order of the cells."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._pooled: mx.array | None = None

    def add(self, rows: mx.array) -> None:
        """The next rows [tokens, width], which may be unevaluated. Evaluates. Raises Internal (LOGITS_NOT_FINITE): who
        searches by a vector that is no number finds nothing, and all that is compared with it.
        """
        match self._pooling:
            case Pooling.MEAN:
                added = rows.astype(mx.float32).sum(axis=0)
                self._pooled = added if self._pooled is None else self._pooled + added
            case Pooling.LAST:
                self._pooled = rows[-1].astype(mx.float32)
            case Pooling.FIRST if self._pooled is None:
                self._pooled = rows[0].astype(mx.float32)
        assert self._pooled is not None
        if not mx.isfinite(self._pooled).all().item():
            raise Internal(
                "the model computed what is no number; the text has no embedding", reason="LOGITS_NOT_FINITE"
            )

    @property
    def vector(self) -> Vector:
        """Of the length 1, as the direction of a mean is that of its sum."""
        return () if self._pooled is None else of_length_one(np.array(self._pooled))
