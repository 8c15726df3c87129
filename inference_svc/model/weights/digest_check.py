"""Reads a served model's weights again, slowly: a kept digest is believed while only the file's stat is compared."""

import threading
from pathlib import Path

import structlog
from blake3 import blake3
from kvasir.server.machine import machine_bytes

from inference_svc.model.model_identity import forget_digest, kept_digest
from inference_svc.model.weights.weight_files import weight_paths

_LOG = structlog.get_logger(__name__)
_BEGINS_AFTER_S = 10.0  # first turns go first
_PIECE_BYTES = 4 << 20
_REST_S = 0.005  # behind each piece, which takes a millisecond or two


class DigestCheck:
    """Checks in a thread of its own, once. It reads and does not map: a file may be cut short meanwhile."""

    def __init__(self, directory: Path, cache_dir: Path, begins_after_s: float = _BEGINS_AFTER_S) -> None:
        self._directory, self._cache_dir, self._begins_after_s = directory, cache_dir, begins_after_s
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="digest-check", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def wait(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        self._is_closed.wait(self._begins_after_s)
        try:
            paths = weight_paths(self._directory)
            if sum(path.stat().st_size for path in paths) > machine_bytes() // 2:
                return  # they would drive each other out of the page cache
            for path in paths:
                self._check(path)
        except OSError as error:
            _LOG.warning("weights.not_checked", error=str(error))

    def _check(self, path: Path) -> None:
        kept, hasher = kept_digest(path, self._cache_dir), blake3()
        with path.open("rb", buffering=0) as file:
            while piece := file.read(_PIECE_BYTES):
                hasher.update(piece)
                if self._is_closed.wait(_REST_S):
                    return
        # Once more: a file that was replaced meanwhile has another identity, and no digest yet.
        if kept is not None and kept == kept_digest(path, self._cache_dir) and hasher.hexdigest() != kept:
            forget_digest(path, self._cache_dir)
            _LOG.error(
                "weights.changed",
                file=path.name,
                what="its bytes are not those of its digest, by which memories of this model are kept; check the file, "
                "and start the engine again",
            )
