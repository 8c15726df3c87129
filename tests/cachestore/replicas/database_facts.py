"""What a database knows of itself and of its bucket, without a server."""

from copy import copy
from itertools import count
from typing import Self

from cachestore_svc.blobs.bucket.catalogs_bucket import Home

_NUMBERS = count(1)


class Facts:
    """Implements `Database` of the bucket's owner."""

    def __init__(self, home: Home = Home("7001.5", "00000001"), proofs: tuple[str, ...] = ("-",)) -> None:
        self._home, self._proofs = home, proofs

    def home(self) -> Home:
        return self._home

    def look(self) -> Home:
        return self._home

    def proofs(self) -> tuple[str, ...]:
        return self._proofs

    def next_proof(self) -> str:
        if len(self._proofs) == 1:
            self._proofs += (f"proof-{next(_NUMBERS)}",)
        return self._proofs[1]

    def keep_proof(self, proof: str) -> None:
        if self._proofs[1:] == (proof,):
            self._proofs = (proof,)

    def copied(self) -> Self:
        """The server's files, byte by byte."""
        return copy(self)
