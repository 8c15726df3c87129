"""Turns that gave up their rows to others, and how they go on where they were.

The small parts of such a turn stay: its tokens, its text, its sampler with key and constraint. Its KV leaves as tensor
files, which its listener keeps, and comes back as files from outside, checked like any others. KV that does not come
back is computed again from the tokens, the prompt in its cells and the reply token by token. States are taken where the
turn is; they come back with all of its KV or not at all.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvasir.errors import DataLoss
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.active_sequence import MOST_REWIND_POINTS, ActiveSequence
from inference_svc.engine.api import AgentKey
from inference_svc.engine.sampling import Sampler
from inference_svc.engine.turn import Turn
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import check_files, check_state
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner

logger = logging.getLogger(__name__)


@dataclass
class _PreemptedTurn:
    sampler: Sampler
    chain: tuple[str, ...]
    tokens: int  # tokens whose KV is in the files
    rewind_points: tuple[int, ...]  # token counts of the state files, which come last; the last count is `tokens`
    unstored_bytes: int  # bytes of files that are still in memory


class PreemptedTurns:
    """The preempted turns of one engine. On the MLX thread."""

    def __init__(self, runner: ModelRunner, model: ModelInfo, max_unstored_bytes: int) -> None:
        """`max_unstored_bytes` bounds the files that have not left this machine's memory."""
        self._runner = runner
        self._model = model
        self._max_unstored_bytes = max_unstored_bytes
        self._turns: dict[Turn, _PreemptedTurn] = {}

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._turns

    def has(self, key: AgentKey) -> bool:
        """Whether a turn of the key is preempted."""
        return any(turn.plan.key == key for turn in self._turns)

    def have_room(self, turns: Iterable[Turn]) -> bool:
        """Whether the files of these turns may be held in memory too."""
        states_bytes = MOST_REWIND_POINTS * self._model.state_bytes
        more = sum(turn.computed * self._model.kv_bytes_per_token + states_bytes for turn in turns if turn.computed)
        held = sum(preempted.unstored_bytes for preempted in self._turns.values())
        return not more or held + more <= self._max_unstored_bytes

    def put(self, active: ActiveSequence) -> None:
        """Make files of a turn's KV and emit them as `Preempted`. The caller has flushed the KV, and drops it."""
        turn, model = active.turn, self._model
        tokens = turn.token_ids[: turn.computed]
        chain = chain_hashes(model.kv_identity_hash, tokens, active.chain)
        if turn.computed:
            active.kv.mark()
        points = active.kv.rewind_points
        identities = file_identities(model.kv_identity_hash, tokens, chain) if active.kv.row_layers else []
        identities += [state_identity(model.kv_identity_hash, tokens, point, chain) for point in points]
        files = tuple(active.kv.to_file(model.kv_identity, identity) for identity in identities)
        self._turns[turn] = _PreemptedTurn(active.sampler, chain, turn.computed, points, sum(map(len, files)))
        turn.preempted(files)

    def stored(self, turn: Turn) -> None:
        """The turn's files have left memory. Without effect if it is no longer preempted."""
        if preempted := self._turns.get(turn):
            preempted.unstored_bytes = 0

    def take_back(self, turn: Turn, blobs: Sequence[bytes]) -> ActiveSequence:
        """The turn with KV from its files, or from as many leading ones as arrived whole."""
        preempted = self._turns.pop(turn)
        restored = self._restored_with_states if self._model.has_states else self._restored
        kv, kept = restored(turn, preempted, blobs)
        turn.resumed(kept, turn.shareable)
        return ActiveSequence(turn, kv, preempted.sampler, preempted.chain[: kept // BLOCK_TOKENS])

    def forget(self, turn: Turn) -> None:
        """The turn is over. Without effect if it is not preempted."""
        self._turns.pop(turn, None)

    def _restored_with_states(
        self, turn: Turn, preempted: _PreemptedTurn, blobs: Sequence[bytes]
    ) -> tuple[SequenceKV, int]:
        """All KV or none: states can only go on from where they were taken."""
        model, tokens = self._model, turn.token_ids[: preempted.tokens]
        rows = len(blobs) - len(preempted.rewind_points)
        try:
            if rows >= 0 and preempted.rewind_points:
                files = check_files(model.kv_identity, model.kv_identity_hash, blobs[:rows], tokens)
                states = [
                    check_state(model.kv_identity, model.kv_identity_hash, blob, tokens[:point])
                    for blob, point in zip(blobs[rows:], preempted.rewind_points, strict=True)
                ]
                return SequenceKV.from_files(model.kv_identity, files, preempted.tokens, states), preempted.tokens
        except DataLoss:
            logger.warning("swap.damaged")
        return self._runner.new_kv(model.kv_identity.policy), 0

    def _restored(self, turn: Turn, preempted: _PreemptedTurn, blobs: Sequence[bytes]) -> tuple[SequenceKV, int]:
        model, tokens = self._model, preempted.tokens
        while blobs:
            covered = min(len(blobs) * BLOCK_TOKENS, tokens)
            keep = covered if covered == tokens else self._edge_before(turn, covered)
            try:
                files = check_files(model.kv_identity, model.kv_identity_hash, blobs, turn.token_ids[:covered])
                if keep:
                    return SequenceKV.from_files(model.kv_identity, files, keep), keep
                break
            except DataLoss as error:
                logger.warning("swap.damaged")
                blobs = blobs[: min(int(error.metadata.get("blob", "0")), len(blobs) - 1)]
        return self._runner.new_kv(model.kv_identity.policy), 0

    def _edge_before(self, turn: Turn, tokens: int) -> int:
        """The last position from which the rest of the prompt gets the same bits: an edge of the grid."""
        return tokens if tokens >= turn.prompt_tokens else tokens // self._model.cell_tokens * self._model.cell_tokens
