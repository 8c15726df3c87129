"""Blocks of vLLM's KV in a cache store, by the tokens before them. It needs neither vLLM nor torch.

A block has the bytes of 256 tokens in every layer, as vLLM holds them. Their meaning is vLLM's, so that KV of another
model, type, layout or version has another KV identity and is never found. An engine of Kvasir never takes one."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile

from blake3 import blake3

from kvasir.cachestore.v1 import identity_pb2
from kvasir.clients import StoreClient
from kvasir.clients.newest_agents import FORGOTTEN_AT_ONCE, newest_agents
from kvasir.errors import Conflict, DataLoss, FailedPrecondition, InvalidArgument, NotFound
from kvasir.formats import block_file, manifest, tensor_layouts
from kvasir.formats.block_hash import BLOCK_TOKENS, block_hash_chain, chain_hashes, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.token_files import file_identities

_MOST_DIGESTS = 65_536  # of 16 M tokens; about 20 MB
_LOG = logging.getLogger("kvasir.store_for_vllm")


@dataclass(frozen=True, slots=True)
class _Kept:
    """A prompt in the store: the chain hashes of its blocks, none if another process stored it."""

    chain: tuple[str, ...]


class StoredKv:
    """The KV of one model in the caller's namespace of a store. One thread saves; any may find and read.

    `model`: any text that other weights, types, layouts or versions do not have. `token_bytes`: the bytes of a token in
    each layer, even numbers. `keep`: how many prompts stay stored, the newest."""

    def __init__(
        self,
        store: StoreClient,
        model: str,
        token_bytes: Sequence[int],
        keep: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._keep = keep
        self._clock = clock
        self._identity = _identity(model, token_bytes)
        self._hash = kv_identity_hash(self._identity)
        self._prefix = f"vllm/{self._hash[:16]}/"
        self._specs = tensor_layouts.expected_tensors(self._identity, BLOCK_TOKENS)
        # Of a block with its header: the room for one is made before its bytes come.
        self._most_bytes = sum(token_bytes) * BLOCK_TOKENS + block_file.MAX_HEADER_BYTES
        self._namespace: str | None = None
        # Of blocks that the store has had, by chain hash, those used last; it finds any other.
        self._digests: OrderedDict[str, Digest] = OrderedDict()
        # By name, the oldest first, by no clock: one that was set back would drop new ones.
        self._kept: dict[str, _Kept] | None = None
        self._older: Iterator[str] = iter(())  # prompts that earlier processes left, and that are too many

    def find(self, tokens: Sequence[int], timeout_s: float | None = None) -> Sequence[Digest]:
        """The blocks that the store has of these tokens, the first ones, none that is too large to be one. Raises a
        KvasirError."""
        if self._namespace is None:
            self._namespace = self._store.get_capabilities(timeout_s=timeout_s).namespace
        chain = block_hash_chain(self._namespace, self._hash, tokens)
        if not chain:
            return []
        found = self._store.find_prefix(self._hash, chain, timeout_s=timeout_s)
        blocks = [Digest.from_proto(each) for each in found.blocks[: len(chain)]]
        return list(takewhile(lambda each: each.size_bytes <= self._most_bytes, blocks))

    def read(
        self, tokens: Sequence[int], blocks: Mapping[int, Digest], timeout_s: float | None = None
    ) -> Iterator[tuple[int, list[memoryview]]]:
        """By number of a block of these tokens, its layers. Raises a KvasirError, DataLoss for another block's."""
        chain = chain_hashes(self._hash, tokens)
        files = file_identities(self._hash, tokens[: len(chain) * BLOCK_TOKENS], chain)
        numbers = iter(blocks)
        for digest, data in self._store.get_blobs(list(blocks.values()), timeout_s=timeout_s):
            number = next(numbers)
            header = block_file.parse_header(data, len(data))
            if header.identity != files[number] or header.tensors != self._specs:
                raise DataLoss(f"blob {digest} is not block {number} of these tokens")
            self._remember({chain[number]: digest})
            yield number, list(header.parts(data).values())

    def save(self, tokens: Sequence[int], blocks: Mapping[int, Sequence[bytes]]) -> None:
        """Keep a prompt of whole blocks, durably; `blocks` has the layers of those that are new. One whose other blocks
        are not in the store is left out. Raises a KvasirError."""
        chain = chain_hashes(self._hash, tokens)
        files = file_identities(self._hash, tokens, chain)
        known = {each: digest for each in chain if (digest := self._digests.get(each))}
        made: dict[Digest, bytes] = {}
        for number, layers in blocks.items():
            blob = block_file.encode(files[number], list(zip(self._specs, layers, strict=True)))
            made[digest := Digest.of(blob)] = blob
            known[chain[number]] = digest
        if len(known) < len(chain):
            known |= dict(zip(chain, self.find(tokens), strict=False))
        if len(known) < len(chain):
            _LOG.info("%d tokens are not kept: their first blocks are not stored", len(tokens))
            return
        self._store.put_blobs(made)
        try:
            self._commit(tokens, chain, [known[each] for each in chain])
        except FailedPrecondition:  # the store has let some of them go since
            for each in chain:
                self._digests.pop(each, None)
            raise
        self._remember(known)

    def _remember(self, digests: Mapping[str, Digest]) -> None:
        for each, digest in digests.items():
            self._digests.pop(each, None)
            self._digests[each] = digest
        for _ in range(len(self._digests) - _MOST_DIGESTS):
            self._digests.popitem(last=False)

    def _commit(self, tokens: Sequence[int], chain: tuple[str, ...], blocks: Sequence[Digest]) -> None:
        now = int(self._clock() * 1000)
        data = manifest.build(
            blocks=blocks,
            created_unix_ms=now,
            kv_identity=self._identity,
            token_ids=tokens,
            token_chars=[0] * len(tokens),
            shareable_tokens=len(tokens),
        )
        name = self._prefix + chain[-1][:32]
        with suppress(Conflict):  # another process stored these very tokens
            self._store.commit(name, self._store.put_manifest(data), 0)
        self._forget_others(name, _Kept(chain))

    def _forget_others(self, name: str, new: _Kept) -> None:
        """Those that the new prompt has whole, and the oldest of too many. Shared blocks stay."""
        if self._kept is None:
            newest, self._older = newest_agents(self._store, self._prefix, self._keep)
            self._kept = {each.agent_id: _Kept(()) for each in reversed(newest)}
        begun = [each for each, kept in self._kept.items() if kept.chain and kept.chain == new.chain[: len(kept.chain)]]
        self._kept.pop(name, None)
        self._kept[name] = new
        older = {*islice(self._older, FORGOTTEN_AT_ONCE)} - self._kept.keys()
        for each in {*begun, *list(self._kept)[: -self._keep], *older} - {name}:
            try:
                self._store.delete_agent(each)
            except FailedPrecondition as refused:  # pinned, or being moved: tried again with the next prompts
                _LOG.info("%s", refused)
                continue
            except NotFound:  # another process was first
                pass
            self._kept.pop(each, None)


def _identity(model: str, token_bytes: Sequence[int]) -> identity_pb2.KvIdentity:
    """A layer's bytes as 16-bit words, in one head."""
    if not model or not token_bytes or any(each < 2 or each % 2 for each in token_bytes):
        raise InvalidArgument("token_bytes: expected even numbers of bytes, one for each layer", field="token_bytes")
    layers = [
        identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=1, key_dim=each // 2)
        for each in token_bytes
    ]
    weights = blake3(b"vllm kv\0" + model.encode()).hexdigest()
    return identity_pb2.KvIdentity(weights_digest=weights, layers=layers, policy=tensor_layouts.plain_policy(16))
