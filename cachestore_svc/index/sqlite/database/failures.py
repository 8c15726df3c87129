"""Errors of SQLite and of the disk under it, translated into errors that a caller can act on."""

import sqlite3

from kvasir.errors import KvasirError, Unavailable

from cachestore_svc.blobs.disk import disk_full, is_no_room, refusal
from cachestore_svc.index.refusals import index_damaged

NO_TEXT = "Could not decode"  # python's message for text that is no UTF-8


def is_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return is_no_room(error)
    return isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_FULL


def cannot_write(error: sqlite3.Error) -> bool:
    return _code(error) in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def translated(error: BaseException, catalog: str = "") -> BaseException:
    """The error in words that a caller can act on. A bug of ours stays as it is."""
    if isinstance(error, OSError):
        return refusal(error, "the index")
    if isinstance(error, KvasirError) or not isinstance(error, sqlite3.Error):
        return error
    if is_full(error):
        return disk_full("the index")
    code = _code(error)
    # "Could not decode to UTF-8" has no code of SQLite's: Python found it. Everything stored once was UTF-8.
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or str(error).startswith(NO_TEXT):
        return index_damaged(str(error), catalog)
    if cannot_write(error) or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY):
        return Unavailable(f"the index cannot be used: {error}", reason="INDEX_FAILED", retry_after_s=1.0)
    return error
