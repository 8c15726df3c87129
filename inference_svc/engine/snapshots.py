"""Tensor files of a memory, or of a turn that still runs. On the MLX thread; the bytes are copies."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Tokens
from types import MappingProxyType
from typing import TypeAlias

from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.layer_groups import layers_of, windows_of
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.api import Snapshot, WindowFiles
from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.sequence_files import files_of, whole_blocks
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_info import ModelInfo

File: TypeAlias = tuple[FileIdentity, bytes]


def memory_snapshot(
    memory: ResidentMemory | None,
    model: ModelInfo,
    first_block: int,
    max_blocks: int | None,
    stored_windows: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> Snapshot | None:
    """Blocks from `first_block` on, at most `max_blocks`. The tail, the windows and the states come with the last
    block. `stored_windows`: blocks of windows that the asker has.
    """
    if memory is None:
        return None
    tokens, last_block = memory.state.token_ids, len(memory.chain)
    if max_blocks is not None and first_block + max_blocks < last_block:
        last_block = first_block + max_blocks
        tokens = tokens[: last_block * BLOCK_TOKENS]
    files = _files(memory.kv, model, tokens, memory.chain[:last_block], first_block)
    if last_block < len(memory.chain):
        return Snapshot(first_block, tuple(files), None, memory.state)
    tail = _pop_tail(files)
    windows = tuple(
        _window(memory, model, window, stored_windows.get(window, ())) for window in windows_of(model.kv_identity)
    )
    return Snapshot(first_block, tuple(files), tail, memory.state, _states(memory, model), windows)


def running_snapshot(sequence: Sequence, model: ModelInfo, first_block: int, max_blocks: int | None) -> Snapshot:
    """Full blocks from `first_block` on, at most `max_blocks`, of a turn whose KV is flushed."""
    assert sequence.kv is not None
    tokens = sequence.token_ids[: sequence.full_blocks * BLOCK_TOKENS]
    chain = sequence.known_chain = chain_hashes(model.kv_identity_hash, tokens, sequence.known_chain)
    last_block = len(chain) if max_blocks is None else min(first_block + max_blocks, len(chain))
    files = _files(sequence.kv, model, tokens[: last_block * BLOCK_TOKENS], chain[:last_block], first_block)
    return Snapshot(first_block, tuple(files), None, sequence.state())


def _files(
    kv: SequenceKV, model: ModelInfo, token_ids: Tokens[int], chain: Tokens[str], first_block: int
) -> list[File]:
    """Of the layers that keep all tokens."""
    if not layers_of(model.kv_identity, 0):
        return []
    return _written(kv, file_identities(model.kv_identity_hash, token_ids, chain, first_block))


def _window(memory: ResidentMemory, model: ModelInfo, window: int, stored: Collection[int]) -> WindowFiles:
    held = whole_blocks(memory.kv, window)
    wanted = {*held} - {*stored} | {len(memory.chain)}  # the tail's too
    identities = file_identities(model.kv_identity_hash, memory.state.token_ids, memory.chain, 0, window)
    files = _written(memory.kv, [each for each in identities if each.start // BLOCK_TOKENS in wanted])
    tail = _pop_tail(files)
    return WindowFiles(window, tuple(held), tuple(files), tail)


def _states(memory: ResidentMemory, model: ModelInfo) -> tuple[File, ...]:
    if not model.has_states:
        return ()
    tokens, hash_ = memory.state.token_ids, model.kv_identity_hash
    points = memory.kv.rewind_points
    return tuple(_written(memory.kv, [state_identity(hash_, tokens, point, memory.chain) for point in points]))


def _written(kv: SequenceKV, identities: list[FileIdentity]) -> list[File]:
    return list(zip(identities, files_of(kv, identities), strict=True))


def _pop_tail(files: list[File]) -> File | None:
    return files.pop() if files and files[-1][0].kind == "tail" else None
