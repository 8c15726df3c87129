"""How many bytes of the device's memory a model's KV gets, and how many it could have at most."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvasir.errors import FailedPrecondition

from inference_svc.machine.claims import Claims
from inference_svc.model.device_memory import card, device_bytes, held_by_others
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.probing.real_layouts import agent_bytes

T = TypeVar("T")
GIB = 1 << 30
# Of the device's memory, for activations of a prefill and for the rest of the machine.
_HEADROOM = 0.125
# Of a card, where a size is given: one cell of a prompt needs that at least.
_LEAST_HEADROOM = 1 / 64
# `auto` takes half of the most that it could, so that another engine finds some, and at most so many whole contexts.
_AUTO_PART, _AUTO_AGENTS = 2, 64
_LEAST_TOKENS = 1024


class NoRoom(FailedPrecondition):
    """The device's memory has no room for this, beside what others claim."""


@dataclass(frozen=True, slots=True)
class Device:
    """The memory that engines share. `claimed_bytes`: by others. `held_bytes`: of a card, by other engines and other
    programs, now.
    """

    total_bytes: int
    claimed_bytes: int = 0
    held_bytes: int = 0

    @property
    def taken_bytes(self) -> int:
        """An engine that starts has not taken yet what it claims; another program claims nothing."""
        return max(self.claimed_bytes, self.held_bytes)

    @property
    def left_bytes(self) -> int:
        """For weights and KV."""
        least = int(self.total_bytes * _LEAST_HEADROOM) if self.held_bytes else 0
        return max(0, self.total_bytes - self.taken_bytes - least)

    def most_kv_bytes(self, info: ModelInfo) -> int:
        """For KV beside the weights."""
        return max(0, int(self.total_bytes * (1 - _HEADROOM)) - self.taken_bytes - info.weights_bytes)

    def auto_kv_bytes(self, info: ModelInfo) -> int:
        """The bytes of `--memory-gib auto`. Raises NoRoom."""
        most, context = self.most_kv_bytes(info), info.context_tokens
        least = agent_bytes(info.kv_identity, min(context, _LEAST_TOKENS))
        if most < least:
            raise NoRoom(
                f"memory: the weights have {_gib(info.weights_bytes)} GiB and the KV of {_LEAST_TOKENS} tokens "
                f"{_gib(least)}; {self.in_words}, an eighth of which is for computing",
                reason="NO_MEMORY",
                field="memory_gib",
            )
        return max(least, min(most // _AUTO_PART, _AUTO_AGENTS * agent_bytes(info.kv_identity, context)))

    @property
    def in_words(self) -> str:
        """Its numbers, for an error."""
        total, taken = _gib(self.total_bytes), _gib(self.taken_bytes)
        if self.held_bytes > self.claimed_bytes:
            return f"the device has {total} GiB, of which others hold {taken} (`nvidia-smi` shows them)"
        others = f", of which other engines here claim {taken}" if self.claimed_bytes else " in all"
        return f"the device has {total} GiB{others}"


class KvBudget:
    """The bytes of the models of one engine, which it claims."""

    def __init__(
        self,
        claims: Claims,
        total_bytes: int,
        given_bytes: int | None,
        weights_bytes: int,
        held: Callable[[], int] = lambda: 0,
    ) -> None:
        """`given_bytes`: None for `auto`; `weights_bytes`: of the largest model, if they are known; `held`: of the
        card, by others. Raises NoRoom, before anything is loaded, for more than is left.
        """
        self._claims, self._total_bytes, self._given_bytes = claims, total_bytes, given_bytes
        self._held = held
        self._claims.claim(lambda claimed_bytes: self._checked(claimed_bytes, weights_bytes))

    def opener(self, open_engine: Callable[..., T]) -> Callable[..., T]:
        """`Engine.open` with this budget, which claims a model's weights before it loads them. Raises NoRoom then."""

        def opened(path: str, **options: Any) -> T:
            self._claims.claim(lambda claimed_bytes: self._checked(claimed_bytes, weights_on_disk([path])))
            return open_engine(path, memory_budget_bytes=self.of, **options)

        return opened

    def of(self, info: ModelInfo) -> int:
        """KV bytes of a model that is loaded instead of the one before. Raises NoRoom."""

        def decide(claimed_bytes: int) -> int:
            if self._given_bytes is not None:  # others may have come while no model was loaded
                return self._checked(claimed_bytes, info.weights_bytes)
            return info.weights_bytes + self._device(claimed_bytes).auto_kv_bytes(info)

        return self._claims.claim(decide) - info.weights_bytes

    def model_is_gone(self) -> None:
        """Claim nothing until the next model is loaded."""
        self._claims.claim(lambda _: 0)

    def _device(self, claimed_bytes: int) -> Device:
        return Device(self._total_bytes, claimed_bytes, self._held())

    def _checked(self, claimed_bytes: int, weights_bytes: int) -> int:
        needed, device = weights_bytes + (self._given_bytes or 0), self._device(claimed_bytes)
        if needed > device.left_bytes:
            named = "memory" if self._given_bytes is None else f"--memory-gib {self._given_bytes / GIB:.15g}"
            raise NoRoom(
                f"{named}: {device.in_words}; the weights take {_gib(weights_bytes)}, and `kvasir doctor` shows "
                f"how many agents fit beside them{_which_fits(device.left_bytes - weights_bytes)}",
                reason="NO_MEMORY",
                field="memory_gib",
            )
        return needed


def weights_on_disk(paths: Iterable[str]) -> int:
    """Bytes of the largest of these models' weights; a model that is still to be fetched has none yet."""
    files = ((file.stat().st_size for file in Path(path).glob("*.safetensors")) for path in paths)
    return max(map(sum, files), default=0)


def claims_of_device() -> Claims:
    """Claims to the memory of the device: of each card apart, and apart from the RAM. Raises ClaimsUnusable."""
    return Claims(card=card())


def total_bytes(device_gib: float | None) -> int:
    """Of the device, or the smaller number that is given."""
    return device_bytes() if device_gib is None else min(device_bytes(), int(device_gib * GIB))


def held_of(total_bytes: int) -> int:
    """Of so many bytes of a card, or of all, those that others hold; 0 of a device whose memory is the machine's."""
    return max(0, held_by_others() - (device_bytes() - total_bytes))


def _which_fits(size_bytes: int) -> str:
    tenths = 10 * size_bytes // GIB
    return f"; --memory-gib {tenths / 10} fits" if tenths > 0 else ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.2f}"
