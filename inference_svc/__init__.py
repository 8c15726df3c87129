"""The inference service: owns MLX, turns text into tokens, and keeps agents' KV hot."""

from inference_svc.model.blas import load_optimized_blas

# Here, because it must come before the first `import mlx` of whichever module comes first.
load_optimized_blas()
