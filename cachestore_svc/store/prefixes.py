"""Finds the longest stored prefix of a chain of block hashes, in every group of a model's layers: all blocks of layers
that keep all tokens, and of each window those that the next token sees.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile

from kvasir.errors import InvalidArgument
from kvasir.formats.block_hash import BLOCK_TOKENS, window_block_hash
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import first_touched_block

from cachestore_svc.core.core import Core
from cachestore_svc.core.stored_blobs import promised
from cachestore_svc.facts.limits import check_hash, check_range
from cachestore_svc.facts.records import MAX_BLOCK_HASHES_PER_REQUEST, MAX_GROUPS_PER_REQUEST, FoundPrefix, GroupBlocks
from cachestore_svc.index.catalog import SLICE, CatalogView
from cachestore_svc.index.values import BlobEntry


def check_groups(groups: Sequence[int]) -> None:
    """Raises InvalidArgument unless these are groups of a layout, ascending."""
    check_range("groups", len(groups), 1, MAX_GROUPS_PER_REQUEST)
    if list(groups) != sorted(set(groups)) or not 0 <= groups[0] <= groups[-1] < 1 << 32:
        raise InvalidArgument.of("groups", "expected different windows, ascending, and 0 before them")


class Prefixes:
    def __init__(self, core: Core) -> None:
        self._core = core

    def find(
        self, namespace: str, kv_identity_hash: str, block_hashes: Sequence[str], groups: Sequence[int] = (0,)
    ) -> FoundPrefix:
        """The longest stored, shareable prefix of a chain in these groups (0: all tokens). Extends lifetimes."""
        check_groups(groups)
        check_range("block_hashes", len(block_hashes), 0, MAX_BLOCK_HASHES_PER_REQUEST)
        check_hash(kv_identity_hash)
        for each in block_hashes:
            check_hash(each, "block_hashes")
        found = _find(_PrefixSearch(self._core, namespace, kv_identity_hash), block_hashes, groups)
        self._core.counters.add(namespace, "prefix_blocks_found", sum(len(each.blocks) for each in found.groups))
        return found


def _find(search: "_PrefixSearch", block_hashes: Sequence[str], groups: Sequence[int]) -> FoundPrefix:
    if has_all := groups[0] == 0:
        kept = search.leading(block_hashes)
        block_hashes = block_hashes[: len(kept)]
    windows = {window: [window_block_hash(each, window) for each in block_hashes] for window in groups if window}
    stored = {window: search.are_bound(hashes) for window, hashes in windows.items()}
    count = covered_blocks(stored, len(block_hashes))
    found = [GroupBlocks(0, 0, tuple(kept[:count]))] if has_all else []
    for window, hashes in windows.items():
        first = first_touched_block(window, count * BLOCK_TOKENS)
        blocks = search.leading(hashes[first:count])
        if len(blocks) < count - first:  # one was removed since
            return FoundPrefix(0, ())
        found.append(GroupBlocks(window, first, tuple(blocks)))
    return FoundPrefix(count * BLOCK_TOKENS, tuple(found))


def covered_blocks(stored: Mapping[int, Sequence[bool]], most: int) -> int:
    """Blocks of the longest prefix, at most `most`, of which every window has what the next token sees (`stored`)."""
    unbroken = {window: _unbroken(found) for window, found in stored.items()}

    def is_covered(count: int) -> bool:
        first = {window: first_touched_block(window, count * BLOCK_TOKENS) for window in unbroken}
        return all(runs[count] >= count - first[window] for window, runs in unbroken.items())

    return next((count for count in range(most, 0, -1) if is_covered(count)), 0)


def _unbroken(found: Sequence[bool]) -> list[int]:
    """At place n, how many blocks right before block n are stored without a gap."""
    runs = [0]
    for is_stored in found:
        runs.append(runs[-1] + 1 if is_stored else 0)
    return runs


class _PrefixSearch:
    """Looks for bound block hashes, in operations of SLICE."""

    def __init__(self, core: Core, namespace: str, kv_identity_hash: str) -> None:
        self._core, self._namespace, self._kv_hash = core, namespace, kv_identity_hash

    def leading(self, block_hashes: Sequence[str]) -> list[Digest]:
        """Blobs of the leading hashes that are bound; the caller may rely on them for a grace period."""
        found: list[Digest] = []
        for start in range(0, len(block_hashes), SLICE):
            some = block_hashes[start : start + SLICE]
            found += [blob.digest for blob in promised(self._core, self._namespace, partial(self._leading, some))]
            if len(found) < start + len(some):
                break
        return found

    def are_bound(self, block_hashes: Sequence[str]) -> list[bool]:
        """For each hash whether it is bound. Promises nothing: few of these blobs may be needed."""
        bound: set[str] = set()
        for start in range(0, len(block_hashes), SLICE):
            some = block_hashes[start : start + SLICE]
            bound |= self._core.read(self._namespace, partial(self._bound, some)).keys()
        return [each in bound for each in block_hashes]

    def _bound(self, block_hashes: Sequence[str], view: CatalogView) -> Mapping[str, BlobEntry]:
        return view.bound_blobs(self._kv_hash, block_hashes)

    def _leading(self, block_hashes: Sequence[str], view: CatalogView) -> list[BlobEntry]:
        bound = self._bound(block_hashes, view)
        return [bound[each] for each in takewhile(bound.__contains__, block_hashes)]
