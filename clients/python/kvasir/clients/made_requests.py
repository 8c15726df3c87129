"""A stream's requests that are made while they are sent, and the error of making one, which gRPC does not report."""

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class MadeRequests:
    """For one call: its requests go through `of` or `aio_of`, and it is made within `told`."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def of(self, requests: Iterable[_T]) -> Iterator[_T]:
        try:
            yield from requests
        except Exception as error:
            self._error = error
            raise

    async def aio_of(self, requests: AsyncIterable[_T]) -> AsyncIterator[_T]:
        try:
            async for request in requests:
                yield request
        except Exception as error:
            self._error = error
            raise

    @contextmanager
    def told(self) -> Iterator[None]:
        """Raises the error that ended the requests in the place of what gRPC makes of it."""
        try:
            yield
        except BaseException:
            if self._error is not None:
                raise self._error from None
            raise
