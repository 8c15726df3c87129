"""What every test run begins with."""

import inference_svc  # noqa: F401  it loads an optimized BLAS, which must come before any test imports MLX
