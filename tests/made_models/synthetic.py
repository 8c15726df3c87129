"""A writer that plays an engine: Q4-shaped tensors of a named geometry, turns, forks, windows and states, without MLX.

KV bytes are a function of (engine seed, KV identity, tokens so far), so two agents with one prefix write the same
blobs, as an engine's grid does; another seed is another machine, whose bytes for the same tokens differ.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from blake3 import blake3
from kvasir.cachestore.v1 import identity_pb2, manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.block_file import FileIdentity, encode
from kvasir.formats.block_hash import BLOCK_TOKENS, block_hash_chain, chain_hash, kv_identity_hash
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import first_touched_block, windows_of
from kvasir.formats.tensor_layouts import TensorSpec, expected_state_tensors, expected_tensors

VOCABULARY = 1024


def full_layers(count: int, kv_heads: int, dim: int) -> list[identity_pb2.LayerLayout]:
    layout = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_FULL, kv_heads=kv_heads, key_dim=dim, value_dim=dim)
    return [layout] * count


def kv_identity(name: str, layers: Iterable[identity_pb2.LayerLayout]) -> identity_pb2.KvIdentity:
    """A Q4 identity (affine, group 64, fp16 scales) whose weights digest comes from a name."""
    policy = identity_pb2.KvPolicy(
        key_bits=4,
        value_bits=4,
        group_size=64,
        scale_type=identity_pb2.SCALE_TYPE_FLOAT16,
        key_rotation=identity_pb2.KEY_ROTATION_NONE,
    )
    return identity_pb2.KvIdentity(weights_digest=blake3(name.encode()).hexdigest(), layers=layers, policy=policy)


def _mixed() -> identity_pb2.KvIdentity:
    tensors = [
        identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_FLOAT32, shape=[2, 16, 8]),
        identity_pb2.StateTensor(type=identity_pb2.TENSOR_TYPE_FLOAT16, shape=[3, 32]),
    ]
    state = identity_pb2.LayerLayout(kind=identity_pb2.LAYER_KIND_STATE, state_tensors=tensors)
    return kv_identity("mixed", [*full_layers(1, 1, 64), window_layer(128), state])


def window_layer(window: int) -> identity_pb2.LayerLayout:
    return identity_pb2.LayerLayout(
        kind=identity_pb2.LAYER_KIND_WINDOW, window=window, kv_heads=1, key_dim=64, value_dim=64
    )


TINY = kv_identity("tiny", full_layers(8, 2, 64))
SMALL = kv_identity("small", full_layers(1, 1, 64))
"""The smallest that is still real: for tests that write many thousand blobs."""
LLAMA_8B = kv_identity("llama-3.1-8b", full_layers(32, 8, 128))
"""Its 256-token block is 9.4 MB."""
MIXED = _mixed()
"""One full, one window and one recurrent layer."""
WINDOWED = kv_identity("windowed", [window_layer(512), *full_layers(1, 1, 64), window_layer(300), window_layer(512)])
"""Two windows, one of them of two layers, as hybrids of full and sliding attention have them."""
GEOMETRIES: Mapping[str, identity_pb2.KvIdentity] = {
    "tiny": TINY,
    "small": SMALL,
    "llama-3.1-8b": LLAMA_8B,
    "mixed": MIXED,
    "windowed": WINDOWED,
}


@dataclass(frozen=True)
class SyntheticSnapshot:
    """What a turn leaves: the manifest, and the blobs that this turn made (the manifest not among them)."""

    manifest: manifest_pb2.Manifest
    manifest_bytes: bytes
    manifest_digest: Digest
    new_blobs: Mapping[Digest, bytes]

    @property
    def digests(self) -> list[Digest]:
        """Every tensor blob that the manifest names, in its order."""
        return manifests.digests(self.manifest)


@dataclass
class SyntheticAgent:
    """One agent's memory under one KV identity, growing by turns."""

    identity: identity_pb2.KvIdentity = field(default_factory=lambda: TINY)
    seed: int = 0
    engine_seed: int = 0
    token_ids: list[int] = field(default_factory=list)
    shareable_tokens: int = 0
    parent_manifest: str = ""
    turns: int = 0
    more_window_blocks: int = 0  # that it keeps before those that the next token sees
    _chains: list[str] = field(default_factory=list)  # of the full blocks
    _blocks: list[Digest] = field(default_factory=list)
    _states: list[tuple[int, Digest]] = field(default_factory=list)
    _window_blocks: dict[tuple[int, int], Digest] = field(default_factory=dict)  # by window and index

    def turn(self, tokens: int | Sequence[int], is_prompt: bool = False, request_id: str = "") -> SyntheticSnapshot:
        """Learn tokens (a number of random ones, or these) and publish. The tokens of a prompt are shareable."""
        self.turns += 1
        if isinstance(tokens, int):
            source = random.Random(f"{self.seed}/{self.turns}/{len(self.token_ids)}")
            tokens = [source.randrange(VOCABULARY) for _ in range(tokens)]
        if is_prompt and self.shareable_tokens == len(self.token_ids):
            self.shareable_tokens += len(tokens)
        self.token_ids += tokens
        return self._publish(request_id or f"request-{self.seed}-{self.turns}")

    def trim(self, tokens: int) -> None:
        """Go back to the first `tokens` tokens, as after DIVERGE."""
        full = tokens // BLOCK_TOKENS
        del self.token_ids[tokens:], self._chains[full:], self._blocks[full:]
        self._window_blocks = {place: digest for place, digest in self._window_blocks.items() if place[1] < full}
        self.shareable_tokens = min(self.shareable_tokens, tokens)
        self._states = [point for point in self._states if point[0] <= tokens]

    def fork(self, seed: int) -> "SyntheticAgent":
        """Another agent with the same memory, whose next tokens differ."""
        return replace(
            self,
            seed=seed,
            token_ids=list(self.token_ids),
            _chains=list(self._chains),
            _blocks=list(self._blocks),
            _states=list(self._states),
            _window_blocks=dict(self._window_blocks),
        )

    @classmethod
    def remember(cls, manifest: manifest_pb2.Manifest, seed: int, turns: int, engine_seed: int = 0) -> "SyntheticAgent":
        """The agent whose memory a manifest is, ready for its next turn."""
        agent = cls(manifest.kv_identity, seed, engine_seed, list(manifest.token_ids), manifest.shareable_tokens)
        agent.turns = turns
        agent._new_blocks()
        agent._window_blocks = {
            (each.window, index): Digest.from_proto(digest)
            for each in manifest.windows
            for index, digest in enumerate(each.blocks, start=each.first_block)
        }
        agent._states = [(point.tokens, Digest.from_proto(point.digest)) for point in manifest.states]
        return agent

    def block_hashes(self, namespace: str) -> list[str]:
        """What an engine asks FindPrefix for: hashes of the full blocks of all its tokens."""
        return block_hash_chain(namespace, kv_identity_hash(self.identity), self.token_ids)

    def _publish(self, request_id: str) -> SyntheticSnapshot:
        new: dict[Digest, bytes] = {}
        has_all = bool(expected_tensors(self.identity, 1))
        new |= self._new_blocks()
        tail = self._new_tail(new, 0) if has_all else None
        windows = [self._window(each, new) for each in windows_of(self.identity)]
        if expected_state_tensors(self.identity):
            data = state_file(self.identity, self.token_ids, self.engine_seed)
            self._states.append((len(self.token_ids), Digest.of(data)))
            new[Digest.of(data)] = data
        manifest = self._manifest(tail, windows, request_id)
        manifest_bytes = manifest.SerializeToString(deterministic=True)
        digest = Digest.of(manifest_bytes)
        self.parent_manifest = digest.hash
        return SyntheticSnapshot(manifest, manifest_bytes, digest, new)

    def _new_tail(self, new: dict[Digest, bytes], group: int) -> Digest | None:
        if not (rows := len(self.token_ids) % BLOCK_TOKENS):
            return None
        tokens, index = tuple(self.token_ids[-rows:]), len(self._chains)
        data = tensor_file(self.identity, index, self._last_chain(), tokens, self.engine_seed, group)
        new[Digest.of(data)] = data
        return Digest.of(data)

    def _window(self, window: int, new: dict[Digest, bytes]) -> manifest_pb2.WindowBlocks:
        """The files of one window. Blocks that an earlier turn made are not made again."""
        first = max(0, first_touched_block(window, len(self.token_ids)) - self.more_window_blocks)
        for index in range(first, len(self._chains)):
            if (window, index) not in self._window_blocks:
                tokens = tuple(self.token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
                parent = self._chains[index - 1] if index else ""
                data = tensor_file(self.identity, index, parent, tokens, self.engine_seed, window)
                self._window_blocks[window, index] = Digest.of(data)
                new[Digest.of(data)] = data
        tail = self._new_tail(new, window)
        return manifest_pb2.WindowBlocks(
            window=window,
            first_block=first,
            blocks=[self._window_blocks[window, index].to_proto() for index in range(first, len(self._chains))],
            tail=tail.to_proto() if tail else None,
        )

    def _new_blocks(self) -> dict[Digest, bytes]:
        new: dict[Digest, bytes] = {}
        kv_hash = kv_identity_hash(self.identity)
        has_all = bool(expected_tensors(self.identity, 1))
        while (start := len(self._chains) * BLOCK_TOKENS) + BLOCK_TOKENS <= len(self.token_ids):
            tokens = tuple(self.token_ids[start : start + BLOCK_TOKENS])
            if has_all:
                data = tensor_file(self.identity, len(self._chains), self._last_chain(), tokens, self.engine_seed)
                self._blocks.append(Digest.of(data))
                new[self._blocks[-1]] = data
            self._chains.append(chain_hash(kv_hash, self._last_chain(), tokens))
        return new

    def _last_chain(self) -> str:
        return self._chains[-1] if self._chains else ""

    def _manifest(
        self, tail: Digest | None, windows: Sequence[manifest_pb2.WindowBlocks], request_id: str
    ) -> manifest_pb2.Manifest:
        words = [f"w{token} " for token in self.token_ids]
        return manifest_pb2.Manifest(
            format=1,
            kv_identity=self.identity,
            token_ids=self.token_ids,
            text="".join(words),
            token_chars=[len(word) for word in words],
            blocks=[digest.to_proto() for digest in self._blocks],
            tail=tail.to_proto() if tail else None,
            states=[manifest_pb2.StatePoint(tokens=n, digest=digest.to_proto()) for n, digest in self._states],
            windows=windows,
            shareable_tokens=self.shareable_tokens,
            parent_manifest=self.parent_manifest,
            turn=manifest_pb2.Turn(request_id=request_id, prompt_tokens=self.shareable_tokens, finish_reason="stop"),
            created_unix_ms=1_700_000_000_000 + self.turns,
        )


def asleep(manifest: manifest_pb2.Manifest, wake_ms: int = 1200) -> bytes:
    """The same memory, asleep: without its blobs, of which it knows the digests."""
    made = manifest_pb2.Manifest()
    made.CopyFrom(manifest)
    let_go = [*manifest.blocks, *([manifest.tail] if manifest.HasField("tail") else [])]
    made.asleep.CopyFrom(manifest_pb2.Asleep(files=let_go, wake_ms=wake_ms))
    made.computed.SetInParent()
    made.ClearField("blocks")
    made.ClearField("tail")
    return made.SerializeToString(deterministic=True)


def tensor_file(
    identity: identity_pb2.KvIdentity,
    index: int,
    parent_chain: str,
    tokens: tuple[int, ...],
    engine_seed: int = 0,
    group: int = 0,
) -> bytes:
    """Block number `index` of a group of layers, or its tail when the tokens do not fill it."""
    return _tensor_file(identity.SerializeToString(deterministic=True), index, parent_chain, tokens, engine_seed, group)


# A prefix shared by a thousand agents is made once. Sixteen, because a block of a large model is 9 MB.
@lru_cache(maxsize=16)
def _tensor_file(
    identity_bytes: bytes, index: int, parent_chain: str, tokens: tuple[int, ...], engine_seed: int, group: int
) -> bytes:
    identity = identity_pb2.KvIdentity.FromString(identity_bytes)
    kv_hash = kv_identity_hash(identity)
    chain = chain_hash(kv_hash, parent_chain, tokens)
    kind = "block" if len(tokens) == BLOCK_TOKENS else "tail"
    name = FileIdentity(kind, kv_hash, index * BLOCK_TOKENS, len(tokens), chain, group)
    seed = f"{engine_seed}/{chain}/{group}" if group else f"{engine_seed}/{chain}"
    return encode(name, random_tensors(expected_tensors(identity, len(tokens), group), seed))


def state_file(identity: identity_pb2.KvIdentity, token_ids: Sequence[int], engine_seed: int = 0) -> bytes:
    """Memory of the recurrent layers after the tokens."""
    kv_hash = kv_identity_hash(identity)
    chain = ""
    for start in range(0, len(token_ids), BLOCK_TOKENS):
        chain = chain_hash(kv_hash, chain, token_ids[start : start + BLOCK_TOKENS])
    name = FileIdentity("state", kv_hash, 0, len(token_ids), chain)
    specs = expected_state_tensors(identity)
    return encode(name, random_tensors(specs, f"{engine_seed}/state/{chain}"))


def random_tensors(specs: Iterable[TensorSpec], seed: str) -> list[tuple[TensorSpec, bytes]]:
    """Random codes, and finite 16- or 32-bit numbers."""
    source = random.Random(seed)
    return [(spec, _random_values(source, spec)) for spec in specs]


def _random_values(source: random.Random, spec: TensorSpec) -> bytes:
    data = source.randbytes(spec.size_bytes)
    if spec.dtype == "U32":
        return data
    # An exponent whose highest bit is zero belongs to a finite number.
    mask = b"\xff\xbf" if spec.dtype != "F32" else b"\xff\xff\xff\xbf"
    keep = int.from_bytes(mask * (spec.size_bytes // len(mask)), "little")
    return (int.from_bytes(data, "little") & keep).to_bytes(spec.size_bytes, "little")
