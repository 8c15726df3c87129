"""Measurements of the engine: `python -m inference_svc.bench`, for `kvasir bench engine`. Nothing imports this room."""
