"""How a turn gets its KV, and the memory that it leaves."""

import collections.abc

from kvasir.errors import FailedPrecondition
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes

from inference_svc.engine.api import Cold, Hot, Restored, TurnPlan
from inference_svc.engine.sampling import Sampler
from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.engine.sequence import Sequence
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import check_files, check_state
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner

# At the turn's beginning, its prompt, its end, and the memory's own one, which is put back if the turn is undone.
MOST_REWIND_POINTS = 4


def begin(sequence: Sequence, memory: ResidentMemory[SequenceKV] | None, runner: ModelRunner, model: ModelInfo) -> None:
    """Give the turn the KV that its plan reuses. `memory` is the hot memory of its key.

    Raises FailedPrecondition (HOT_MEMORY_GONE, RESTORED_TOKENS_DIFFER, STATE_MISSING) and DataLoss (BLOB_DAMAGED);
    nothing has changed then.
    """
    _get_ready(sequence)
    match sequence.plan.reuse:
        case Cold():
            sequence.kv = runner.new_kv(model.kv_identity.policy)
            sequence.began(0, 0)
        case Hot() as hot:
            _from_memory(sequence, memory, hot)
        case Restored() as restored:
            _from_files(sequence, model, restored)


def begin_sharing(sequence: Sequence, kv: SequenceKV, shared_tokens: int) -> None:
    """Give the turn a fork of the first `shared_tokens` tokens of another KV, which has the bits that the turn would
    compute itself.
    """
    _get_ready(sequence)
    sequence.kv = kv.fork_of(shared_tokens)
    sequence.known_chain = sequence.chain[: shared_tokens // BLOCK_TOKENS]
    sequence.began(shared_tokens, shared_tokens, is_shared=True)


def memory_left(sequence: Sequence, runner: ModelRunner, kv_identity_hash: str) -> ResidentMemory[SequenceKV]:
    """The memory that the turn leaves. Computes the last token, sampled but never fed, if it is remembered."""
    kv, state = sequence.kv, sequence.state()
    assert kv is not None
    missing = state.token_ids[kv.length :]
    if missing:
        runner.prefill(kv, missing)
    kv.trim_to(len(state.token_ids))
    if kv.can_go_on_from(len(state.token_ids)):  # not if states have seen tokens that are not remembered
        kv.mark()
    # Another turn may begin where this one began: a retry, or an edited last message.
    kept = {sequence.cached, sequence.prompt_rewind_point, len(state.token_ids)}
    # A warm-up turn generates nothing, so it keeps the existing rewind points (at most MOST_REWIND_POINTS).
    kv.keep_rewind_points(kept if sequence.plan.generates else kv.rewind_points[-MOST_REWIND_POINTS:])
    sequence.rewind_points = kv.rewind_points
    state = sequence.state()
    known = sequence.known_chain[: len(state.token_ids) // BLOCK_TOKENS]
    chain = chain_hashes(kv_identity_hash, state.token_ids, known)
    return ResidentMemory(kv, state, chain, priority=sequence.priority)


def undo(sequence: Sequence) -> None:
    """Make the hot memory that the turn extends what it was before the turn, to the bit."""
    if sequence.memory is not None and sequence.kv is not None:
        sequence.kv.trim_to(sequence.cached)
        if sequence.saved is not None:
            sequence.kv.put_back(sequence.saved)
        sequence.kv.release_spare()


def _get_ready(sequence: Sequence) -> None:
    sequence.sampler = Sampler(sequence.plan.sampling, sequence.plan.token_ids, sequence.matcher)
    sequence.leave_queue()


def _from_memory(sequence: Sequence, memory: ResidentMemory[SequenceKV] | None, hot: Hot) -> None:
    keep = _kept(sequence.plan, hot.keep_tokens)
    if memory is not None:
        keep = memory.kv.start_before(keep)
    if memory is None or not _begins_with(memory.state.token_ids, sequence.plan.token_ids, keep):
        raise FailedPrecondition("the agent's hot memory is not the one planned with", reason="HOT_MEMORY_GONE")
    kv = memory.kv
    sequence.saved = kv.saved_rows(keep) if keep < kv.length else None
    kv.trim_to(keep)
    sequence.kv, sequence.memory, sequence.known_chain = kv, memory, memory.chain[: keep // BLOCK_TOKENS]
    sequence.began(keep, memory.state.shareable_tokens)


def _from_files(sequence: Sequence, model: ModelInfo, restored: Restored) -> None:
    keep = _kept(sequence.plan, restored.keep_tokens)
    if not _begins_with(restored.token_ids, sequence.plan.token_ids, keep):
        raise FailedPrecondition("the restored tokens are not the prompt's", reason="RESTORED_TOKENS_DIFFER")
    files = check_files(model.kv_identity, model.kv_identity_hash, restored.blobs, restored.token_ids)
    states = []
    if model.has_states:
        if restored.state is None or keep < restored.keep_tokens:
            raise FailedPrecondition("the plan restores no state of the tokens that it keeps", reason="STATE_MISSING")
        kept_ids = restored.token_ids[:keep]
        states = [check_state(model.kv_identity, model.kv_identity_hash, restored.state, kept_ids)]
    sequence.kv = SequenceKV.from_files(model.kv_identity, files, keep, states)
    sequence.known_chain = tuple(file.header.identity.chain for file in files[: keep // BLOCK_TOKENS])
    sequence.began(keep, restored.shareable_tokens)


def _kept(plan: TurnPlan, keep_tokens: int) -> int:
    return min(keep_tokens, plan.most_reused)


def _begins_with(tokens: collections.abc.Sequence[int], prompt: collections.abc.Sequence[int], count: int) -> bool:
    return len(tokens) >= count and tuple(tokens[:count]) == tuple(prompt[:count])
