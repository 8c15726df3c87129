"""The inference service: owns MLX, turns text into tokens, and keeps agents' KV hot."""

import os

from inference_svc.model.blas import load_optimized_blas

# Here, because both must come before the first import of whichever module comes first: of `mlx`, and of `transformers`,
# which else warns that models need PyTorch. We take its tokenizers.
load_optimized_blas()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
