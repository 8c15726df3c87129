"""What a page is: 256 tokens of one layer's K and V, byte for byte as a block file holds them: 16-bit units, part by
part (codes, scales and biases of K, then of V; or 16-bit values), each `[kv_heads, 256, units]`. Needs no MLX.
"""

from dataclasses import dataclass
from functools import cached_property

from kvasir.cachestore.v1 import identity_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.tensor_layouts import layer_tensors

PAGE_TOKENS = BLOCK_TOKENS
UNIT_BYTES = 2
EXACT_BITS = 16


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How the rows of K or of V are stored: `bits` 4 or 8 in groups along the head, or 16 as they are."""

    kv_heads: int
    dim: int  # values per head and row
    bits: int
    group_size: int = 0  # values that share a scale and a bias; 0 with 16 bits
    is_rotated: bool = False  # by a Hadamard transform along the head, before the quantization

    @property
    def is_quantized(self) -> bool:
        return self.bits != EXACT_BITS

    @property
    def part_units(self) -> tuple[int, ...]:
        """Units that a row of one head has in each part: codes, scales, biases; or values."""
        if not self.dim:
            return ()
        if not self.is_quantized:
            return (self.dim,)
        groups = self.dim // self.group_size
        return (self.dim * self.bits // EXACT_BITS, groups, groups)


@dataclass(frozen=True, slots=True)
class Part:
    """Where one part lies in a page: `[kv_heads, 256, units]` from unit `offset` on. Codes are 32-bit words there."""

    offset: int
    kv_heads: int
    units: int  # of a row of one head
    is_codes: bool = False

    @property
    def size(self) -> int:
        return self.kv_heads * PAGE_TOKENS * self.units


@dataclass(frozen=True)
class PageFormat:
    """The page of one layer. `scale_type` is that of scales, biases and 16-bit values."""

    key: RowFormat
    value: RowFormat
    scale_type: identity_pb2.ScaleType

    @classmethod
    def of(cls, identity: identity_pb2.KvIdentity, layer: int) -> "PageFormat":
        """The page of one entry of a layout, which must be a layer with rows."""
        entry, policy = identity.layers[layer], identity.policy

        def rows(dim: int, bits: int, *, is_rotated: bool) -> RowFormat:
            if bits == EXACT_BITS or layer in policy.exact_layers:
                return RowFormat(entry.kv_heads, dim, EXACT_BITS)
            return RowFormat(entry.kv_heads, dim, bits, policy.group_size, is_rotated)

        has_rotated_keys = policy.key_rotation == identity_pb2.KEY_ROTATION_HADAMARD
        keys = rows(entry.key_dim, policy.key_bits, is_rotated=has_rotated_keys)
        made = cls(keys, rows(entry.value_dim, policy.value_bits, is_rotated=False), policy.scale_type)
        assert made.bytes == sum(tensor.size_bytes for tensor in layer_tensors(identity, layer, PAGE_TOKENS))
        return made

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of K, then those of V, in the order of a file's tensors."""
        found, offset = [], 0
        for rows in (self.key, self.value):
            for number, units in enumerate(rows.part_units):
                found.append(Part(offset, rows.kv_heads, units, is_codes=rows.is_quantized and number == 0))
                offset += found[-1].size
        return tuple(found)

    @cached_property
    def units(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def bytes(self) -> int:
        return self.units * UNIT_BYTES
