"""Which files of window layers the store holds: of a memory, or of a prefix that several agents share."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import first_touched_block


@dataclass(frozen=True, slots=True)
class StoredWindow:
    """The files of one window's layers by block, with gaps where no token that the memory may go on with looks."""

    files: Mapping[int, Digest] = field(default_factory=dict)
    tail: int | None = None  # the block that is a tail, the last one; None: all are full

    @property
    def full(self) -> frozenset[int]:
        return frozenset(self.files) - {self.tail}

    def before(self, block: int) -> "StoredWindow":
        return StoredWindow({each: digest for each, digest in self.files.items() if each < block and each != self.tail})


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
    return all(
        all(block in stored.files for block in blocks_seen(window, tokens)) for window, stored in windows.items()
    )


def stored_windows(listed: Iterable[manifest_pb2.WindowBlocks]) -> dict[int, StoredWindow]:
    found: dict[int, StoredWindow] = {}
    for run in listed:
        files = dict(found[run.window].files) if run.window in found else {}
        files |= enumerate(map(Digest.from_proto, run.blocks), int(run.first_block))
        tail = int(run.first_block) + len(run.blocks) if run.HasField("tail") else None
        if tail is not None:
            files[tail] = Digest.from_proto(run.tail)
        found[int(run.window)] = StoredWindow(files, tail)
    return found


def listed_windows(windows: Mapping[int, StoredWindow]) -> list[manifest_pb2.WindowBlocks]:
    runs: list[manifest_pb2.WindowBlocks] = []
    for window, stored in sorted(windows.items()):
        for block, digest in sorted(stored.files.items()):
            if not runs or (runs[-1].window, runs[-1].first_block + len(runs[-1].blocks)) != (window, block):
                runs.append(manifest_pb2.WindowBlocks(window=window, first_block=block))
            if block == stored.tail:
                runs[-1].tail.CopyFrom(digest.to_proto())
            else:
                runs[-1].blocks.append(digest.to_proto())
    return runs
