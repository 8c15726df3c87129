"""Keeps the costs of restores and prefills over restarts: else a restarted engine restores the KV of all agents that
come at once, over however slow a link. A damaged file, or a disk that takes none, costs that knowledge.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path

import structlog
from kvasir.credentials import replace_private_text
from kvasir.waits import ANSWER_S

from inference_svc.memory.restore_costs import RestoreCosts

_LOG = structlog.get_logger(__name__)
_NAME = "restore-costs.json"


class CostsFile:
    def __init__(self, state_dir: Path, conditions: str, costs: RestoreCosts, now_ms: Callable[[], int]) -> None:
        """`conditions`: the model and the device of which the costs are. `now_ms`: Unix time."""
        self._path = state_dir / _NAME
        self._conditions = conditions
        self.costs = costs
        self._now_ms = now_ms
        self._written = 0  # measurements that the file has
        self._is_refused = False  # whether the disk did not take the last ones
        self._gate = threading.Lock()  # the last write may come beside the one before it

    def read(self) -> None:
        """Begin with the file's costs, if they are of this model and device, and of no later time than now."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            since_ms = self._now_ms() - found["unix_ms"]
            if found["conditions"] == self._conditions and since_ms >= 0:
                self.costs.begin_with(found["costs"], since_ms / 1e3)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            _LOG.warning("restore_costs.unreadable", file=str(self._path), error=type(error).__name__)

    async def keep(self) -> None:
        """Write new costs now and then, and at the end."""
        try:
            while True:
                await asyncio.sleep(ANSWER_S)
                await asyncio.to_thread(self.write)
        finally:
            self.write()

    def write(self) -> None:
        with self._gate:
            if (learned := self.costs.learned) == self._written:
                return
            kept = {"conditions": self._conditions, "unix_ms": self._now_ms(), "costs": self.costs.kept()}
            try:
                replace_private_text(self._path, json.dumps(kept))
                self._written, self._is_refused = learned, False
            except OSError as error:
                if not self._is_refused:
                    _LOG.warning("restore_costs.not_kept", file=str(self._path), error=type(error).__name__)
                self._is_refused = True
