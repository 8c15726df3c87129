"""The inference service: owns MLX, turns text into tokens, and keeps agents' KV hot."""

import os
import sys
import time

from kvasir.server.lean_imports import hidden

from inference_svc.file_limit import keep_file_limit
from inference_svc.lean_transformers import import_transformers_without_torch
from inference_svc.model.blas import load_optimized_blas

BEGAN_S = time.monotonic()  # before the imports that take seconds
with hidden("rich"):  # structlog would draw errors' traces by it, which no log has
    import structlog  # noqa: F401
# Here, because all must come before the first import of whichever module comes first: of `mlx`, of `mlx_lm`, and of
# `transformers`, which else warns that models need PyTorch. We take its tokenizers.
load_optimized_blas()
import_transformers_without_torch()
keep_file_limit()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
if sys.platform == "darwin":
    # MLX's Metal back end commits its commands behind 40 or 50 operations, or behind as many million values of inputs:
    # one kernel over a layer's pages has more. By operations alone that is every second or third layer. This is read
    # with MLX's first look at the device, which is before a model is loaded.
    os.environ.setdefault("MLX_MAX_MB_PER_BUFFER", "4000")
