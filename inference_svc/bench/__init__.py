"""Measurements of the engine: `python -m inference_svc.bench`, for `kvasir bench engine`. Nothing imports this room."""

import sys

import structlog

# A program's stdout is its JSON. A service that one of them starts sets its own logs.
structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
