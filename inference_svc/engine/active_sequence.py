"""A running turn with its KV: how it begins from a memory, the memory that it leaves, and how it is undone."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvasir.errors import FailedPrecondition
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes

from inference_svc.engine.api import Cold, Hot, Restored, TurnPlan
from inference_svc.engine.sampling import Sampler
from inference_svc.engine.scheduling.hot_memories import ResidentMemory
from inference_svc.engine.turn import Turn
from inference_svc.kv.sequence_kv import SavedRows, SequenceKV
from inference_svc.kv.tensor_files import check_files, check_state
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner

# At the turn's beginning, its prompt, its end, and the memory's own one, which is put back if the turn is undone.
MOST_REWIND_POINTS = 4


@dataclass
class ActiveSequence:
    """`memory` is the hot memory whose KV the turn extends; `saved` are its rows that the turn overwrites."""

    turn: Turn
    kv: SequenceKV
    sampler: Sampler
    chain: tuple[str, ...]  # chain hashes of the first full blocks
    memory: ResidentMemory[SequenceKV] | None = None
    saved: SavedRows | None = None

    @classmethod
    def sharing(cls, turn: Turn, kv: SequenceKV, shared_tokens: int) -> "ActiveSequence":
        """The turn with a fork of the first `shared_tokens` tokens of another KV, which has the bits that it would
        compute itself.
        """
        turn.leave_queue()
        forked = kv.fork_of(shared_tokens)
        turn.began(shared_tokens, shared_tokens, is_shared=True)
        return cls(turn, forked, _sampler(turn), turn.chain[: shared_tokens // BLOCK_TOKENS])

    def memory_left(self, runner: ModelRunner, kv_identity_hash: str) -> ResidentMemory[SequenceKV]:
        """The memory that the turn leaves. Computes the last token, sampled but never fed, if it is remembered."""
        state = self.turn.state()
        missing = state.token_ids[self.kv.length :]
        if missing:
            runner.prefill(self.kv, missing)
        self.kv.trim_to(len(state.token_ids))
        if self.kv.can_go_on_from(len(state.token_ids)):  # not if states have seen tokens that are not remembered
            self.kv.mark()
        # Another turn may begin where this one began: a retry, or an edited last message.
        kept = {self.turn.cached, self.turn.prompt_rewind_point, len(state.token_ids)}
        # A warm-up turn generates nothing, so it keeps the existing rewind points (at most MOST_REWIND_POINTS).
        self.kv.keep_rewind_points(kept if self.turn.plan.generates else self.kv.rewind_points[-MOST_REWIND_POINTS:])
        self.turn.rewind_points = self.kv.rewind_points
        state = self.turn.state()
        known = self.chain[: len(state.token_ids) // BLOCK_TOKENS]
        chain = chain_hashes(kv_identity_hash, state.token_ids, known)
        return ResidentMemory(self.kv, state, chain, priority=self.turn.priority)

    def undo(self) -> None:
        """Make the hot memory what it was before the turn, to the bit."""
        if self.memory is not None:
            self.kv.trim_to(self.turn.cached)
            if self.saved is not None:
                self.kv.put_back(self.saved)
            self.kv.release_spare()


def begin(
    turn: Turn, memory: ResidentMemory[SequenceKV] | None, runner: ModelRunner, model: ModelInfo
) -> ActiveSequence:
    """Give the turn the KV that its plan reuses. `memory` is the hot memory of its key.

    Raises FailedPrecondition (HOT_MEMORY_GONE, RESTORED_TOKENS_DIFFER, STATE_MISSING) and DataLoss (BLOB_DAMAGED);
    nothing has changed then.
    """
    sampler = _sampler(turn)
    turn.leave_queue()
    match turn.plan.reuse:
        case Cold():
            turn.began(0, 0)
            return ActiveSequence(turn, runner.new_kv(model.kv_identity.policy), sampler, ())
        case Hot() as hot:
            return _from_memory(turn, sampler, memory, hot)
        case Restored() as restored:
            return _from_files(turn, sampler, model, restored)


def _sampler(turn: Turn) -> Sampler:
    return Sampler(turn.plan.sampling, turn.plan.token_ids, turn.matcher)


def _from_memory(turn: Turn, sampler: Sampler, memory: ResidentMemory[SequenceKV] | None, hot: Hot) -> ActiveSequence:
    keep = _kept(turn.plan, hot.keep_tokens)
    if memory is not None:
        keep = memory.kv.start_before(keep)
    if memory is None or not _begins_with(memory.state.token_ids, turn.plan.token_ids, keep):
        raise FailedPrecondition("the agent's hot memory is not the one planned with", reason="HOT_MEMORY_GONE")
    kv = memory.kv
    saved = kv.saved_rows(keep) if keep < kv.length else None
    kv.trim_to(keep)
    turn.began(keep, memory.state.shareable_tokens)
    return ActiveSequence(turn, kv, sampler, memory.chain[: keep // BLOCK_TOKENS], memory, saved)


def _from_files(turn: Turn, sampler: Sampler, model: ModelInfo, restored: Restored) -> ActiveSequence:
    keep = _kept(turn.plan, restored.keep_tokens)
    if not _begins_with(restored.token_ids, turn.plan.token_ids, keep):
        raise FailedPrecondition("the restored tokens are not the prompt's", reason="RESTORED_TOKENS_DIFFER")
    files = check_files(model.kv_identity, model.kv_identity_hash, restored.blobs, restored.token_ids)
    states = []
    if model.has_states:
        if restored.state is None or keep < restored.keep_tokens:
            raise FailedPrecondition("the plan restores no state of the tokens that it keeps", reason="STATE_MISSING")
        kept_ids = restored.token_ids[:keep]
        states = [check_state(model.kv_identity, model.kv_identity_hash, restored.state, kept_ids)]
    kv = SequenceKV.from_files(model.kv_identity, files, keep, states)
    chain = tuple(file.header.identity.chain for file in files[: keep // BLOCK_TOKENS])
    turn.began(keep, restored.shareable_tokens)
    return ActiveSequence(turn, kv, sampler, chain)


def _kept(plan: TurnPlan, keep_tokens: int) -> int:
    return min(keep_tokens, plan.most_reused)


def _begins_with(tokens: Sequence[int], prompt: Sequence[int], count: int) -> bool:
    return len(tokens) >= count and tuple(tokens[:count]) == tuple(prompt[:count])
