"""The catalog in SQLite. Imported only by `postgres`, and where a data directory is opened or looked at."""

from kvasir.server.lean_imports import hidden

with hidden("numpy", "pandas"):  # for types that we never store; pandas alone takes a second
    import sqlite_utils  # noqa: F401
