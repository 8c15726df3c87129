"""Which checks of kernels found nothing, kept under all that their results depend on: each start would repeat them."""

from collections.abc import Sequence
from pathlib import Path

from inference_svc.kv.kept_files import keep_bytes, kept_bytes, named_for


class KeptChecks:
    """A check that failed is never kept: it is repeated at each start, and logged."""

    def __init__(self, folder: Path, conditions: Sequence[str]) -> None:
        self._folder, self._conditions = folder, tuple(conditions)

    def is_right(self, check: str) -> bool:
        return kept_bytes(self._path(check)) == check.encode()

    def keep_right(self, check: str) -> None:
        keep_bytes(self._path(check), check.encode())

    def _path(self, check: str) -> Path:
        return self._folder / f"{named_for(*self._conditions, check)}.right"
