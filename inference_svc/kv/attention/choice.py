"""Which implementation serves a model's KV and products: kernels whose results were checked at the start, or MLX's own
operations, which are the reference.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, TypeAlias

import mlx.core as mx
import structlog
from kvasir.cachestore.v1 import identity_pb2

from inference_svc.kv.attention import tiles
from inference_svc.kv.attention.checks import (
    why_wrong,
    why_wrong_joined,
    why_wrong_layers,
    why_wrong_products,
    why_wrong_steps,
    why_wrong_tiles,
    why_wrong_wide,
    why_wrong_windows,
)
from inference_svc.kv.attention.fused import TYPE_NAMES
from inference_svc.kv.attention.geometry import has_tiles, why_not
from inference_svc.kv.attention.hopper import is_hopper
from inference_svc.kv.attention.kept_checks import KeptChecks
from inference_svc.kv.attention.kernels import Dialect
from inference_svc.kv.codec import layer_codecs
from inference_svc.kv.page import PageFormat
from inference_svc.kv.pages.groups import groups_of
from inference_svc.kv.policy import Rung, policy_of

Wanted: TypeAlias = Literal["auto", "reference"]

REFERENCE = "reference (MLX operations)"
NAMES = {None: REFERENCE, Dialect.CUDA: "fused (CUDA)", Dialect.METAL: "fused (Metal)"}
_TYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}
_FEW_ROWS = "few rows (CUDA)"
_OPERATIONS = "fused, windows by operations"
_LANES = "fused (Metal), without tiles"
_LOG = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Chosen:
    """For people: the implementations that serve a loaded model. `failure`: wrong results of a check; empty: none."""

    attention: str = REFERENCE
    encoding: str = REFERENCE
    products: str = REFERENCE
    failure: str = ""


@cache
def device_dialect() -> Dialect | None:
    """Of this device's kernels; None on a CPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    return Dialect.METAL if mx.metal.is_available() else Dialect.CUDA


class KernelChoice:
    """The choice for one model. A page format is checked when it is first needed, which is before the engine serves."""

    def __init__(self, wanted: Wanted = "auto", kept: KeptChecks | None = None) -> None:
        self._dialect = None if wanted == "reference" else device_dialect()
        self._kept = kept
        self._found: dict[tuple[PageFormat, mx.Dtype], str] = {}
        self._windows: set[tuple[PageFormat, mx.Dtype]] = set()  # for which windows' kernel is right
        self.failures: list[str] = []  # reports name them, and no probe of this model is kept
        self._has_few_rows = False
        self._checked: dict[str, str] = {}  # findings of checks that are of no format
        self.has_wide_rows = False  # and Hopper's own products take that kernel's place for more

    @property
    def conditions(self) -> str:
        """A kept probe depends on this."""
        return self._dialect.value if self._dialect else "reference"

    @property
    def has_failed(self) -> bool:
        return bool(self.failures)

    def dialect(self, identity: identity_pb2.KvIdentity, dtype: mx.Dtype) -> Dialect | None:
        """Of the kernels that write and read the pages of all layers with rows; None: the reference serves."""
        return self.dialect_of(_formats(identity), dtype)

    def dialect_of(self, formats: Collection[PageFormat], dtype: mx.Dtype) -> Dialect | None:
        """As `dialect`, of these formats."""
        if self._dialect is None or not formats or any(why_not(each) for each in formats):
            return None
        is_right = all(not self._failure(each, dtype, self._dialect) for each in sorted(formats, key=repr))
        return self._dialect if is_right else None

    def check_windows(self, identity: identity_pb2.KvIdentity, dtype: mx.Dtype) -> None:
        """Check the kernel that attends over windows of masks, which serves from then on where it is right."""
        if (dialect := self.dialect(identity, dtype)) is None:
            return
        for each in sorted(_formats(identity), key=repr):
            check = partial(why_wrong_windows, each, dtype, dialect)
            if not self._recorded("windows of masks", check, _OPERATIONS, (each, dtype)):
                self._windows.add((each, dtype))

    def has_windows(self, identity: identity_pb2.KvIdentity, dtype: mx.Dtype) -> bool:
        """Whether that kernel was checked and is right; else operations attend over windows."""
        return {(each, dtype) for each in _formats(identity)} <= self._windows

    def takes_few_rows(self) -> bool:
        """Whether the kernel of few rows computes the model's products: on CUDA, where it is right."""
        if self._dialect is Dialect.CUDA:
            self._has_few_rows = not self._once("products of few rows", why_wrong_products, REFERENCE)
        if self._has_few_rows and is_hopper():
            self.has_wide_rows = not self._once("wide products", why_wrong_wide)
        return self._has_few_rows

    def joins_steps(self) -> bool:
        """Whether that kernel also does the steps between a model's products."""
        return self._has_few_rows and not self._once("joined products", why_wrong_joined)

    def takes_layers(self, *, is_packed: bool | None) -> bool:
        """Whether one kernel computes a block of a model whole, for few rows and weights of 4 or of 16 bits; None: of
        any weights, a step's attention alone. Called where `joins_steps` was true.
        """
        if is_packed is None:
            return not self._once("attention of steps", why_wrong_steps)
        check = partial(why_wrong_layers, is_packed=is_packed)
        return not self._recorded("whole layers", check, _FEW_ROWS, is_packed)

    def chosen(self, identity: identity_pb2.KvIdentity, dtype: mx.Dtype, *, reads_pages: bool) -> Chosen:
        """The implementations for the model with this identity, which computes in a type."""
        served = NAMES[self.dialect(identity, dtype) if reads_pages else None]
        products = _FEW_ROWS if self._has_few_rows else REFERENCE
        return Chosen(served, served, products, "; ".join(self.failures))

    def _failure(self, page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> str:
        """The fault that the check of a format finds; empty: none. The check is made once."""
        key = page_format, dtype
        if key not in self._found:
            name = _name_of(page_format)
            self._found[key] = self._recorded(name, lambda: why_wrong(page_format, dtype, dialect), of=key)
            of_tiles = partial(_why_wrong_tiles, page_format, dtype, dialect)
            if not self._found[key] and (why := self._recorded(f"tiles of {name}", of_tiles, _LANES, key)):
                tiles.refuse(page_format, TYPE_NAMES[dtype], why)
        return self._found[key]

    def _once(self, name: str, check: Callable[[], str], serves: str = _FEW_ROWS) -> str:
        if name not in self._checked:
            self._checked[name] = self._recorded(name, check, serves)
        return self._checked[name]

    def _recorded(self, name: str, check: Callable[[], str], serves: str = REFERENCE, of: object = None) -> str:
        """The check's result; a failure is logged, and kept for reports. `of`: its own conditions."""
        known = f"{name} {of!r}"
        if self._kept is not None and self._kept.is_right(known):
            return ""
        if not (why := check()):
            if self._kept is not None:
                self._kept.keep_right(known)
        else:
            self.failures.append(f"{name}: {why}")
            _LOG.error("kernels.check_failed", kernels=self.conditions, checked=name, why=why, serves=serves)
        return why


def are_known(kept: KeptChecks | None, identity: identity_pb2.KvIdentity, dtype: mx.Dtype) -> bool:
    """Whether an earlier start found the kernels of these pages right, or this device has none to check."""
    if device_dialect() is None:
        return True
    return kept is not None and all(kept.is_right(f"{_name_of(each)} {(each, dtype)!r}") for each in _formats(identity))


def checked_policies(layers: Sequence[identity_pb2.LayerLayout], compute_type: str) -> dict[str, str]:
    """By policy that the layers can be stored by, the fault of this device's kernels; empty: none.
    Nothing for a device without kernels.
    """
    dialect, dtype, found = device_dialect(), _TYPES[compute_type], dict[str, str]()
    if dialect is None:
        return found
    with_rows = [layers[index] for group in groups_of(layers) for index in group.layers]
    for rung in Rung:
        policy = policy_of(rung, compute_type)
        keys, values = layer_codecs(policy, 0)
        if any(keys.problem(layer.key_dim) or values.problem(layer.value_dim) for layer in with_rows):
            continue
        formats = _formats(identity_pb2.KvIdentity(layers=layers, policy=policy))
        if not any(map(why_not, formats)):
            whys = (
                check(each, dtype, dialect)
                for each in sorted(formats, key=repr)
                for check in (why_wrong, _why_wrong_tiles)
            )
            found[rung.value] = next(filter(None, whys), "")
    return found


def _why_wrong_tiles(page_format: PageFormat, dtype: mx.Dtype, dialect: Dialect) -> str:
    """As `why_wrong_tiles`, on Metal, where nobody has measured them; CUDA's would cost a start a compiler's time. What
    an earlier check refused serves nothing that could be compared.
    """
    query_type = TYPE_NAMES[dtype]
    if dialect is not Dialect.METAL or not has_tiles(page_format, query_type):
        return ""
    return tiles.why_refused(page_format, query_type) or why_wrong_tiles(page_format, dtype, dialect)


def _name_of(page_format: PageFormat) -> str:
    key_rows, value_rows = page_format.key, page_format.value
    rotated = ", rotated" if key_rows.is_rotated else ""
    return f"pages of K {key_rows.bits} bits{rotated}, V {value_rows.bits} bits, dimension {key_rows.dim}"


def _formats(identity: identity_pb2.KvIdentity) -> set[PageFormat]:
    return {PageFormat.of(identity, index) for group in groups_of(identity.layers) for index in group.layers}
