"""Turns that gave up their rows to others, and how they go on where they were.

Of such a turn all that is small stays: its tokens, its text, its sampler with key and constraint. Its KV leaves as
tensor files, which are its listener's to keep, and comes back as files from outside: checked like any others. What
does not come back is computed again from the tokens, the prompt in its cells and the reply token by token. States are
taken where the turn is, and come back with all of it or not at all.
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
    tokens: int  # whose KV is in the files
    rewind_points: tuple[int, ...]  # whose states are, of a model that has them: the last files, the last at `tokens`
    unstored_bytes: int  # of files that are in memory still


class PreemptedTurns:
    """The turns of one engine that are preempted. On the MLX thread."""

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
        """Make files of a turn's KV and tell of them. The KV is settled, and the caller's to drop."""
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
        """Its files have left memory. Without effect if it is not preempted any more."""
        if preempted := self._turns.get(turn):
            preempted.unstored_bytes = 0

    def take_back(self, turn: Turn, blobs: Sequence[bytes]) -> ActiveSequence:
        """The turn with the KV of its files, or of as many leading ones as are here and whole."""
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
        """All of it or nothing: states go on from where they were taken and from nowhere else."""
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
        """Where a prompt that is computed again goes on as it was computed: at an edge of the grid."""
        return tokens if tokens >= turn.prompt_tokens else tokens // self._model.cell_tokens * self._model.cell_tokens
