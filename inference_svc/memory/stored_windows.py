"""Which files of window layers the store holds: of a memory, or of a prefix that several agents share."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import first_touched_block


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """The files of one window's layers: blocks from `first_block` on, without a gap, and perhaps a tail."""

    first_block: int
    blocks: tuple[Digest, ...]
    tail: Digest | None = None

    @property
    def named(self) -> tuple[Digest, ...]:
        return (*self.blocks, *((self.tail,) if self.tail is not None else ()))

    @property
    def places(self) -> range:
        """Indices of the full blocks."""
        return range(self.first_block, self.first_block + len(self.blocks))

    def files(self, blocks: range) -> tuple[Digest, ...]:
        """The files of these blocks, which are here. The tail is the block behind the last full one."""
        return self.named[blocks.start - self.first_block : blocks.stop - self.first_block]

    def before(self, block: int) -> "StoredWindow":
        """The full blocks before this one."""
        return StoredWindow(self.first_block, self.blocks[: max(0, block - self.first_block)])


@dataclass(frozen=True, slots=True)
class FoundPrefix:
    """The longest stored prefix of a chain: its blocks, and of each window those that the next token sees."""

    tokens: int = 0
    blocks: tuple[Digest, ...] = ()
    windows: Mapping[int, StoredWindow] = field(default_factory=dict)


def blocks_seen(window: int, tokens: int) -> range:
    """The blocks, the last one perhaps in part, that the token at position `tokens` sees in a window's layers."""
    return range(first_touched_block(window, tokens), -(-tokens // BLOCK_TOKENS))


def covers(windows: Mapping[int, StoredWindow], tokens: int) -> bool:
    """Whether a memory can go on after so many tokens: all that the next token sees is stored."""
    return all(stored.first_block <= blocks_seen(window, tokens).start for window, stored in windows.items())


def stored_window(listed: manifest_pb2.WindowBlocks) -> StoredWindow:
    tail = Digest.from_proto(listed.tail) if listed.HasField("tail") else None
    return StoredWindow(int(listed.first_block), tuple(map(Digest.from_proto, listed.blocks)), tail)


def listed_window(window: int, stored: StoredWindow) -> manifest_pb2.WindowBlocks:
    return manifest_pb2.WindowBlocks(
        window=window,
        first_block=stored.first_block,
        blocks=[digest.to_proto() for digest in stored.blocks],
        tail=None if stored.tail is None else stored.tail.to_proto(),
    )
