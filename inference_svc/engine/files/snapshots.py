"""Tensor files of a memory or of a running turn: copies, perhaps still on their way from the device."""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Several
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from kvasir.formats.block_file import FileBytes, FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.layer_groups import layers_of, windows_of
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.api import Snapshot, WindowFiles
from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.host_copies import failed_copies
from inference_svc.kv.sequence_files import begin_files, whole_blocks
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.token_ids import SequenceState

T = TypeVar("T")
MadeT = TypeVar("MadeT")


@dataclass(frozen=True, slots=True)
class PendingFiles(Generic[T]):
    """Files that may still be on their way, and what they become once all are there."""

    files: Several[Future[FileBytes]]
    make: Callable[[list[FileBytes]], T]

    def made_into(self, make: Callable[[T], MadeT]) -> "PendingFiles[MadeT]":
        return PendingFiles(self.files, lambda files: make(self.make(files)))


def when_there(begin: "Callable[[], Future[PendingFiles[T] | None]]") -> "Future[T | None]":
    """The result of work on the MLX thread once its files are there, without threads where these cannot copy."""
    asking = _FilesWait(begin)
    asking.start()
    return asking.asked


class _FilesWait(Generic[T]):
    """What `when_there` waits for. No object that it made refers to it, so that a result that nobody has is gone."""

    def __init__(self, begin: "Callable[[], Future[PendingFiles[T] | None]]") -> None:
        self.asked: Future[T | None] = Future()
        self._begin = begin
        self._coming: PendingFiles[T] | None = None
        self._repeats_left = failed_copies.MOST_FAILURES
        self._failures_before = 0

    def start(self) -> None:
        self._failures_before = failed_copies.out.in_a_row
        self._begin().add_done_callback(self._begun)

    def _begun(self, begun: "Future[PendingFiles[T] | None]") -> None:
        self._coming = None if begun.cancelled() or begun.exception() is not None else begun.result()
        if self._coming is None:
            self._settle(begun)
        else:
            self._await_files()

    def _await_files(self, _copied: object = None) -> None:
        assert self._coming is not None
        for file in self._coming.files:
            if not file.done():
                file.add_done_callback(self._await_files)
                return
        coming, self._coming = self._coming, None
        failed = next((error for file in coming.files if (error := file.exception()) is not None), None)
        if failed is not None and self._repeats_left:
            failed_copies.out.failed(failed, self._failures_before)
            self._repeats_left -= 1
            self.start()
            return
        made: Future[T | None] = Future()
        try:
            made.set_result(coming.make([file.result() for file in coming.files]))
        except Exception as error:  # noqa: BLE001 - the asker gets it
            made.set_exception(error)
        self._settle(made)

    def _settle(self, found: "Future[Any]") -> None:
        if found.cancelled():
            self.asked.cancel()
        elif self.asked.set_running_or_notify_cancel():
            if (error := found.exception()) is not None:
                self.asked.set_exception(error)
            else:
                self.asked.set_result(found.result())


def memory_snapshot(
    memory: ResidentMemory | None,
    model: ModelInfo,
    first_block: int,
    max_blocks: int | None,
    stored_windows: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> PendingFiles[Snapshot] | None:
    """Blocks from `first_block` on, at most `max_blocks`; tail, windows and states come with the last block."""
    if memory is None:
        return None
    state, last_block = memory.state.computed, len(memory.chain)
    tokens = state.token_ids
    if max_blocks is not None and first_block + max_blocks < last_block:
        last_block = first_block + max_blocks
        tokens = tokens[: last_block * BLOCK_TOKENS]
    identities = _identities(model, tokens, memory.chain[:last_block], first_block)
    if last_block < len(memory.chain):
        return _coming(memory.kv, identities, first_block, state)
    held = {window: whole_blocks(memory.kv, window) for window in windows_of(model.kv_identity)}
    for window in held:
        identities += _of_window(memory, model, window, {*held[window]} - {*stored_windows.get(window, ())})
    identities += _of_states(memory, model)
    return _coming(memory.kv, identities, first_block, state, held)


def running_snapshot(
    sequence: Sequence, model: ModelInfo, first_block: int, max_blocks: int | None
) -> PendingFiles[Snapshot]:
    """Full blocks from `first_block` on, at most `max_blocks`, of a turn whose KV is flushed."""
    assert sequence.kv is not None
    tokens = sequence.token_ids[: sequence.cells.full_blocks * BLOCK_TOKENS]
    chain = sequence.known_chain = chain_hashes(model.kv_identity_hash, tokens, sequence.known_chain)
    last_block = len(chain) if max_blocks is None else min(first_block + max_blocks, len(chain))
    identities = _identities(model, tokens[: last_block * BLOCK_TOKENS], chain[:last_block], first_block)
    return _coming(sequence.kv, identities, first_block, sequence.state())


def blocks_alone(snapshot: Snapshot) -> Snapshot:
    return Snapshot(snapshot.first_block, snapshot.blocks, None, snapshot.state)


def _identities(model: ModelInfo, token_ids: Several[int], chain: Several[str], first_block: int) -> list[FileIdentity]:
    if not layers_of(model.kv_identity, 0):
        return []
    return file_identities(model.kv_identity_hash, token_ids, chain, first_block)


def _of_window(memory: ResidentMemory, model: ModelInfo, window: int, blocks: Collection[int]) -> list[FileIdentity]:
    wanted = {*blocks, len(memory.chain)}  # the tail's too
    identities = file_identities(model.kv_identity_hash, memory.state.token_ids, memory.chain, 0, window)
    return [each for each in identities if each.start // BLOCK_TOKENS in wanted]


def _of_states(memory: ResidentMemory, model: ModelInfo) -> list[FileIdentity]:
    if not model.has_states:
        return []
    tokens, hash_ = memory.state.token_ids, model.kv_identity_hash
    return [state_identity(hash_, tokens, point, memory.chain) for point in memory.kv.rewind_points]


def _coming(
    kv: SequenceKV,
    identities: list[FileIdentity],
    first_block: int,
    state: SequenceState,
    held: Mapping[int, Several[int]] = MappingProxyType({}),
) -> PendingFiles[Snapshot]:
    def make(files: list[FileBytes]) -> Snapshot:
        named = list(zip(identities, files, strict=True))
        of_group = {group: [each for each in named if each[0].window == group] for group in (0, *held)}

        def blocks(group: int) -> tuple[tuple[FileIdentity, FileBytes], ...]:
            return tuple(each for each in of_group[group] if each[0].kind == "block")

        def tail(group: int) -> tuple[FileIdentity, FileBytes] | None:
            return next((each for each in of_group[group] if each[0].kind == "tail"), None)

        states = tuple(each for each in named if each[0].kind == "state")
        windows = tuple(WindowFiles(window, tuple(held[window]), blocks(window), tail(window)) for window in held)
        return Snapshot(first_block, blocks(0), tail(0), state, states, windows)

    return PendingFiles(begin_files(kv, identities), make)
