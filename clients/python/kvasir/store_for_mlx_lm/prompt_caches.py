"""Prompt caches of mlx-lm in a cache store, by name and by digest. Rows that several caches have are sent once."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from kvasir.clients import Lineage, StoreClient
from kvasir.clients.newest_agents import newest_agents
from kvasir.errors import DataLoss, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats import manifest as manifests
from kvasir.formats.block_hash import chain_hashes
from kvasir.formats.digest import Digest
from kvasir.store_for_mlx_lm.cache_file import is_trimmable, join, split

_MOST_BLOCKS = 65_536  # of 16 M tokens; about 20 MB


@dataclass(frozen=True, slots=True)
class KeptCache:
    """A cache in the store: its name, the tokens that it holds, and whether it can be cut to fewer."""

    name: str
    tokens: "array[int]"
    is_trimmable: bool
    created_unix_ms: int

    def shared_with(self, tokens: "array[int]") -> int:
        """How many of these tokens a request can take from the cache; its last one is computed anyhow."""
        count = len(self.tokens)
        if not self.is_trimmable:
            return count if count < len(tokens) and self.tokens == tokens[:count] else 0
        pairs = enumerate(zip(self.tokens, tokens[:-1], strict=False))
        return next((place for place, (one, other) in pairs if one != other), min(count, len(tokens) - 1))


class PromptCaches:
    """The prompt caches that one model's weights made. One thread saves; any may load.

    `weights`: any text that other weights do not have, such as a digest of their files. An engine never takes such a
    cache for its own: it computes in cells, and mlx-lm does not."""

    def __init__(self, store: StoreClient, weights: str, *, clock: Callable[[], float] = time.time) -> None:
        if not weights:
            raise InvalidArgument("weights: expected a text that names them, such as their digest", field="weights")
        self._store = store
        self._clock = clock
        # Names the weights in the store.
        self.weights_digest = blake3(b"mlx-lm prompt cache\0" + weights.encode()).hexdigest()
        self._identity_hash = ""
        # That the store has, by chain hash, those used last: of any other all rows are sent.
        self._blocks: OrderedDict[str, Digest] = OrderedDict()

    def save(self, name: str, data: bytes, tokens: Sequence[int], *, left_out_blocks: int = 0) -> Digest:
        """Keep a file that mlx-lm's save_prompt_cache wrote, durably, as the newest version of that name; its digest.

        `tokens`: those that the cache holds. `left_out_blocks`: at most `stored_blocks(tokens)`; the file then lacks
        the rows of so many blocks at its beginning. Raises InvalidArgument (tokens, file), FailedPrecondition (the
        store has not all that was left out: save all rows), ResourceExhausted, Conflict, Unavailable."""
        known = self._leading(tokens)[:left_out_blocks]
        if len(known) < left_out_blocks:
            raise _rows_missing()
        now = int(self._clock() * 1000)
        pieces = split(data, tokens, self.weights_digest, now, known=known, identity_hash=self._identity_hash)
        if pieces is None:
            raise _rows_missing()
        self._store.put_blobs(pieces.blobs)
        digest = self._store.put_manifest(pieces.manifest)
        try:
            self._store.commit(name, digest, self._version(name), lineage=Lineage(is_brought=True))
        except FailedPrecondition:
            self._blocks.clear()
            raise
        self._identity_hash = pieces.identity_hash
        self._remember(pieces.blocks)
        return digest

    def stored_blocks(self, tokens: Sequence[int]) -> int:
        """How many blocks of 256 tokens the store is known to have of these: `save` needs no rows there."""
        return len(self._leading(tokens))

    def load(self, which: str | Digest, timeout_s: float | None = None) -> tuple[bytes, list[int]]:
        """The file of that name's newest version, or of a digest that `save` returned, for mlx-lm's load_prompt_cache;
        and its tokens. Raises NotFound, DataLoss, FailedPrecondition (other weights), InvalidArgument (no such cache),
        Unavailable, DeadlineExceeded (not read within `timeout_s`)."""
        if isinstance(which, str):
            data = self._store.get_snapshot(which)[1]
        else:
            data = bytes(self._store.get_blob(which, timeout_s=timeout_s))
        kept = manifests.parse(data)
        if kept.kv_identity.weights_digest != self.weights_digest:
            raise FailedPrecondition("the cache is none of mlx-lm with these weights")
        digests = manifests.digests(kept)
        blobs = dict(self._store.get_blobs(digests, timeout_s=timeout_s))
        try:
            return join(kept, blobs.__getitem__), list(kept.token_ids)
        except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            raise InvalidArgument(f"the memory is no prompt cache of mlx-lm: {error}", field="name") from None

    def kept(self, prefix: str) -> Iterator[KeptCache]:
        """The caches of these weights whose names begin so, but for those that are damaged, or removed meanwhile."""
        for agent in self._store.every_agent(name_prefix=prefix):
            yield from self._read(agent.agent_id)

    def newest(self, prefix: str, most: int) -> tuple[list[KeptCache], Iterator[str]]:
        """The same, of those that were stored last; and the names of older ones, which are read later, page by page."""
        newest, older = newest_agents(self._store, prefix, most)
        return [cache for agent in newest for cache in self._read(agent.agent_id)], older

    def _read(self, name: str) -> Iterator[KeptCache]:
        try:
            kept = manifests.parse(self._store.get_snapshot(name)[1])
        except (NotFound, DataLoss, InvalidArgument):
            return
        if kept.kv_identity.weights_digest == self.weights_digest:
            yield KeptCache(name, array("I", kept.token_ids), is_trimmable(kept), kept.created_unix_ms)

    def remove(self, name: str) -> None:
        """Forget a cache. What no other cache shares goes after the store's grace period. Raises NotFound."""
        self._store.delete_agent(name)

    def _remember(self, blocks: Mapping[str, Digest]) -> None:
        for chain, digest in blocks.items():
            self._blocks.pop(chain, None)
            self._blocks[chain] = digest
        for _ in range(len(self._blocks) - _MOST_BLOCKS):
            self._blocks.popitem(last=False)

    def _version(self, name: str) -> int:
        try:
            return max(line.version for line in self._store.get_agent(name).lines)
        except NotFound:
            return 0

    def _leading(self, tokens: Sequence[int]) -> list[Digest]:
        if not self._identity_hash:
            return []
        found: list[Digest] = []
        for chain in chain_hashes(self._identity_hash, tokens):
            if (digest := self._blocks.get(chain)) is None:
                break
            found.append(digest)
        return found


def _rows_missing() -> FailedPrecondition:
    return FailedPrecondition("the store has not all rows that the file lacks: save all rows", reason="BLOB_MISSING")
