"""Measurements of the engine, a case a file: `python -m inference_svc.bench`, for `kvasir bench engine`."""
