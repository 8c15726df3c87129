"""The inference service: owns MLX, turns text into tokens, and keeps agents' KV hot."""

import os
import time

from inference_svc.lean_transformers import import_transformers_without_torch
from inference_svc.model.blas import load_optimized_blas

BEGAN_S = time.monotonic()  # before the imports that take seconds
# Here, because all must come before the first import of whichever module comes first: of `mlx`, and of `transformers`,
# which else warns that models need PyTorch. We take its tokenizers.
load_optimized_blas()
import_transformers_without_torch()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
