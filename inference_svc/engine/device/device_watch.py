"""Where a pass fails, the part of it that MLX has begun ends first, a device without room gets some, and a lost one
ends the engine. On the MLX thread.
"""

import logging

import mlx.core as mx
from kvasir.errors import Internal, KvasirError, ResourceExhausted

from inference_svc.engine.device.device_errors import DeviceLost, device_error
from inference_svc.model.device_memory import bound_to_free, forget_frames

logger = logging.getLogger(__name__)


class DeviceWatch:
    def __init__(self) -> None:
        self.lost: DeviceLost | None = None
        self._is_short = False

    def settle(self) -> None:
        """Wait until all that was enqueued is computed, or the device is known to be lost."""
        if self.lost is None:
            self._synchronize()

    def pass_failed(self, error: Exception) -> None:
        """While the error's frames hold the arrays of its pass. MLX has recorded a part, and not sent all of that: sent
        later, kernels would write where memory is another's by then, or nobody's.
        """
        self._look_at(error)
        if not isinstance(error, KvasirError):
            self.settle()

    def makes_room(self, error: Exception) -> bool:
        """Whether a pass failed for want of memory, and unused memory was given back, that of the pass included."""
        self.pass_failed(error)
        if not self._is_short:
            return False
        forget_frames(error)
        self._give_back()
        return self.lost is None

    def in_words(self, error: Exception) -> KvasirError:
        """What a turn's caller gets for an error that ended it."""
        if self.lost is not None:
            return self.lost
        if isinstance(error, KvasirError):
            return error
        return device_error(error) or Internal("the turn failed in the engine")

    def end_step(self) -> None:
        """Give unused memory back where a pass had no room. Raises DeviceLost."""
        if self._is_short:
            self._give_back()
        if self.lost is not None:
            raise self.lost

    def _give_back(self) -> None:
        self._is_short = False
        self.settle()  # MLX's threads hold what a pass read, until they hear of its end
        if self.lost is None:
            mx.clear_cache()
            bound_to_free()

    def _synchronize(self) -> None:
        try:
            mx.synchronize()
        except RuntimeError as error:
            self._look_at(error)

    def _look_at(self, error: Exception) -> None:
        found = device_error(error)
        if isinstance(found, DeviceLost) and self.lost is None:
            self.lost = found
            logger.error("device.lost why=%r", found.message)
        elif isinstance(found, ResourceExhausted):
            self._is_short = True
            logger.warning("device.short why=%r", found.message)
