"""How a turn gets its KV: on a fork, so that what it began from stays as it is, and a failed turn is undone."""

import collections.abc
from dataclasses import dataclass

from kvasir.errors import FailedPrecondition
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.layer_groups import first_touched_block

from inference_svc.engine.api import HotMemoryGone, Priority, Restored
from inference_svc.engine.files.incoming import ArrivingFiles, Incoming
from inference_svc.engine.sampling import Sampler
from inference_svc.engine.scheduling.hot_memories import BegunPrefix, ResidentMemory
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.kv_load import KvLoad
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import CheckedFile, FileChecks, check_files, check_state
from inference_svc.model.embedding.hidden_rows import HiddenRows
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner
from inference_svc.text.prefix_matching import common_prefix_length
from inference_svc.text.token_ids import SequenceState, TokenIds

# At the turn's beginning, its prompt and its end, and one more after a turn that generated nothing.
MOST_REWIND_POINTS = 4


@dataclass(frozen=True)
class Reuse:
    """KV in the pool whose first `tokens` tokens a turn begins with; an empty one where it reuses none of the pool."""

    kv: SequenceKV
    tokens: int = 0
    chain: collections.abc.Sequence[str] = ()
    shareable_tokens: int = 0
    is_shared: bool = False  # another turn or memory of the namespace gave it, and it is all that the turn reuses
    memory: ResidentMemory | None = None  # the agent's own, if all of it is reused


def reuse_of_memory(sequence: Sequence, memory: ResidentMemory | None) -> Reuse:
    """What the plan reuses of the key's hot memory. Raises FailedPrecondition (HOT_MEMORY_GONE) if it is another."""
    keep = memory.kv.start_before(min(sequence.reusable_tokens, memory.kv.length)) if memory is not None else 0
    if memory is None or not _begins_with(memory.state.token_ids, sequence.plan.token_ids, keep):
        raise HotMemoryGone
    whole = memory if keep == memory.kv.length else None
    return Reuse(memory.kv, keep, memory.chain, memory.state.shareable_tokens, memory=whole)


def reuse_behind(sequence: Sequence, own: Reuse, prefix: BegunPrefix | None) -> Reuse | None:
    """What a cancelled turn of the agent has prefilled behind the same memory: the rows that this one would compute."""
    if prefix is None:
        return None
    blocks = min((sequence.cells.prompt_tokens - 1) // BLOCK_TOKENS, common_prefix_length(sequence.chain, prefix.chain))
    tokens, shareable = blocks * BLOCK_TOKENS, prefix.state.shareable_tokens
    return Reuse(prefix.kv, tokens, sequence.chain, shareable, memory=own.memory) if tokens > own.tokens else None


def forked_for(sequence: Sequence, reuse: Reuse) -> SequenceKV:
    """A fork of what a turn reuses, with only the rewind points that the turn's memory will keep."""
    forked = reuse.kv.fork(reuse.tokens)
    forked.keep_rewind_points({reuse.tokens} if sequence.plan.generates else _last_points(forked))
    return forked


def mark(kv: SequenceKV) -> None:
    """Make a rewind point of the present length, which is not the end of the turn."""
    kv.mark()
    kv.keep_rewind_points(_last_points(kv))


def _last_points(kv: SequenceKV) -> tuple[int, ...]:
    """The rewind points for which a turn has room beside its end: of windows alone fewer, because they hold pages."""
    return kv.rewind_points[-(MOST_REWIND_POINTS if kv.states else 2) :]


def begin(sequence: Sequence, reuse: Reuse, forked: SequenceKV, model: ModelInfo) -> None:
    """Give the turn its KV: the fork of what it reuses. If its plan restores more, the files behind that are loaded.
    Raises FailedPrecondition (RESTORED_TOKENS_DIFFER, STATE_MISSING) and DataLoss (BLOB_DAMAGED); nothing has changed
    then.
    """
    sequence.sampler = Sampler(sequence.plan.sampling, sequence.plan.token_ids, sequence.matcher, watch=sequence.watch)
    if sequence.plan.pooling is not None:
        sequence.hidden = HiddenRows(sequence.plan.pooling)
    sequence.leave_queue()
    if isinstance(sequence.plan.reuse, Restored) and not reuse.is_shared:
        sequence.arrives(_RestoredKV(sequence, sequence.plan.reuse, forked, model))
        return
    sequence.kv, sequence.extended = forked, reuse.memory
    if reuse.tokens:
        mark(forked)  # a window may go on from where none was
    sequence.known_chain = tuple(reuse.chain[: reuse.tokens // BLOCK_TOKENS])
    sequence.began(reuse.tokens, reuse.shareable_tokens, is_shared=reuse.is_shared)


def memory_left(sequence: Sequence, runner: ModelRunner, kv_identity_hash: str) -> ResidentMemory:
    """The memory that the turn leaves. Where it needs the last token's KV (`computes_last`), that is computed here."""
    kv, length = sequence.kv, sequence.left_tokens
    assert kv is not None
    sequence.decoded_to = min(kv.length, length)
    if missing := sequence.token_ids[kv.length : length]:
        runner.prefill(kv, missing.tolist())
    kv.trim_to(length)
    if kv.can_go_on_from(length):  # not if states have seen tokens that are not remembered
        kv.mark()
    # Another turn may begin where this one began: a retry, or an edited last message.
    kept = {sequence.cells.cached, sequence.cells.rewind_point, length}
    # A warm-up turn generates nothing, so it keeps the existing rewind points.
    kv.keep_rewind_points(kept if sequence.plan.generates else _last_points(kv))
    sequence.rewind_points = kv.rewind_points if kv.states else ()  # windows go on from wherever their blocks are
    known = sequence.known_chain[: length // BLOCK_TOKENS]
    chain = chain_hashes(kv_identity_hash, sequence.token_ids[:length], known)
    # Whoever warms a memory expects a turn of its agent soon.
    priority = sequence.priority if sequence.plan.sampling.max_tokens else Priority.INTERACTIVE
    return ResidentMemory(kv, sequence.state(), chain, priority=priority)


def prefix_left(sequence: Sequence, hot: ResidentMemory | None) -> BegunPrefix | None:
    """The whole blocks of its prompt that a cancelled turn has prefilled, for a retry. `hot`: the agent's memory, which
    stays as it was. Behind all of it the rows serve its agent alone: no cold turn would compute their bits.
    """
    kv, plan, cells, memory = sequence.kv, sequence.plan, sequence.cells, None
    assert kv is not None
    tokens = 0 if kv.states or not sequence.leaves_prefix else kv.start_before(cells.shareable)
    own = min(cells.computed, cells.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    is_behind = hot is not None and sequence.extended is hot and own > hot.kv.length
    is_behind = is_behind and plan.replay is None  # half of a replayed memory goes
    # With windows, the agent's next memory could not go back to where this one ends.
    if is_behind and sequence.leaves_prefix and not kv.has_rewind_points:
        memory, tokens = hot, own
    chain = sequence.chain[: tokens // BLOCK_TOKENS]
    if not chain or tokens % BLOCK_TOKENS:
        return None
    kv.trim_to(tokens)
    shareable = min(cells.shareable, tokens)
    state = SequenceState(plan.token_ids[:tokens], plan.token_chars[:tokens], shareable)
    return BegunPrefix(kv, state, chain, memory=memory)


class _RestoredKV:
    """What a plan restores, on its way (`Arrival`). `begun`: KV of its first blocks, which need no files."""

    def __init__(self, sequence: Sequence, restored: Restored, begun: SequenceKV, model: ModelInfo) -> None:
        keep = sequence.reusable_tokens
        if not _begins_with(restored.token_ids, sequence.plan.token_ids, keep):
            raise FailedPrecondition("the restored tokens are not the prompt's", reason="RESTORED_TOKENS_DIFFER")
        self._incoming = restored.incoming or Incoming.of(restored.blobs)
        checks = FileChecks(model.kv_identity, model.kv_identity_hash, restored.token_ids)
        files = ArrivingFiles(self._incoming, checks)
        states = []
        if model.has_states:
            if restored.state is None or keep < restored.keep_tokens:
                raise FailedPrecondition(
                    "the plan restores no state of the tokens that it keeps", reason="STATE_MISSING"
                )
            kept_ids = restored.token_ids[:keep]
            states = [check_state(model.kv_identity, model.kv_identity_hash, restored.state, kept_ids)]
        self._begun_blocks = begun.length // BLOCK_TOKENS
        self._incoming.skip(self._begun_blocks)
        self.load = KvLoad(begun, files, keep, states, _windows(restored, keep, model))
        self._chain = checks.chain
        self._shareable = restored.shareable_tokens
        self._sequence = sequence

    @property
    def lacks_files(self) -> bool:
        return not self._incoming.has_ended and self.load.lacks_files

    def advance(self, most_files: int, meanwhile: collections.abc.Callable[[], None]) -> None:
        if self._incoming.has_ended and self._incoming.ready < self._incoming.expected:
            self.load.cut(max(self._incoming.ready, self._begun_blocks) * BLOCK_TOKENS)
        if self.load.advance(most_files, meanwhile):
            kept = self.load.kv.length
            self._sequence.kv, self._sequence.known_chain = self.load.kv, tuple(self._chain[: kept // BLOCK_TOKENS])
            self._sequence.began(kept, self._shareable)


def _windows(restored: Restored, keep: int, model: ModelInfo) -> dict[int, list[CheckedFile]]:
    """The checked files of windows, which have all that the token at `keep` sees."""
    first_blocks = {each.window: each.first_block for each in restored.windows}
    if keep and any(
        first_blocks.get(window, keep) > first_touched_block(window, keep) for window in model.window_bytes_per_token
    ):
        raise FailedPrecondition("the plan does not restore what the windows keep", reason="STATE_MISSING")
    return {
        each.window: check_files(
            model.kv_identity, model.kv_identity_hash, each.blobs, restored.token_ids, each.window, each.first_block
        )
        for each in restored.windows
    }


def _begins_with(tokens: TokenIds, prompt: TokenIds, count: int) -> bool:
    return len(tokens) >= count and tokens[:count] == prompt[:count]
