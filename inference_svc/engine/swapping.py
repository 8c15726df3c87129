"""How a turn gives up its rows to others, and how it goes on where it was.

The small parts of such a turn stay: its tokens, its text, its sampler with key and constraint. Its KV leaves as tensor
files, which its listener keeps, and comes back as files from outside, checked like any others. KV that does not come
back is computed again from the tokens, the prompt in its cells and the reply token by token. States are taken where the
turn is; they come back with all of its KV or not at all.
"""

import collections.abc
import logging

from kvasir.errors import DataLoss
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.beginning import MOST_REWIND_POINTS
from inference_svc.engine.sequence import Sequence, SwappedOut
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_files import files_of, from_files, row_layers
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import check_files, check_state
from inference_svc.model.model_info import ModelInfo

logger = logging.getLogger(__name__)


def most_file_bytes(sequence: Sequence, model: ModelInfo) -> int:
    """Bytes of a turn's files, or somewhat fewer than this; 0 if it has no KV."""
    states_bytes = MOST_REWIND_POINTS * model.state_bytes
    return sequence.computed * model.kv_bytes_per_token + states_bytes if sequence.computed else 0


def swap_out(sequence: Sequence, model: ModelInfo) -> None:
    """Make files of a turn's KV and emit them as `Preempted`. The KV is flushed; the turn gives it up."""
    kv = sequence.kv
    assert kv is not None
    tokens = sequence.token_ids[: sequence.computed]
    chain = chain_hashes(model.kv_identity_hash, tokens, sequence.known_chain)
    if sequence.computed:
        kv.mark()
    points = kv.rewind_points
    identities = file_identities(model.kv_identity_hash, tokens, chain) if row_layers(model.kv_identity) else []
    identities += [state_identity(model.kv_identity_hash, tokens, point, chain) for point in points]
    files = tuple(files_of(kv, identities))
    sequence.swapped = SwappedOut(sequence.computed, points, sum(map(len, files)))
    kv.release()
    sequence.kv, sequence.known_chain = None, chain
    sequence.preempted(files)


def swap_in(sequence: Sequence, pool: KvPool, model: ModelInfo, blobs: collections.abc.Sequence[bytes]) -> None:
    """Give the turn its KV from its files, or from as many leading ones as arrived whole."""
    swapped, sequence.swapped = sequence.swapped, None
    assert swapped is not None
    restored = _with_states if model.has_states else _without_states
    kv, kept = restored(sequence, swapped, pool, model, blobs) or (SequenceKV(pool), 0)
    sequence.kv, sequence.known_chain = kv, sequence.known_chain[: kept // BLOCK_TOKENS]
    sequence.resumed(kept, sequence.shareable)


_Kept = tuple[SequenceKV, int] | None  # KV and its tokens; None if nothing came back


def _with_states(
    sequence: Sequence, swapped: SwappedOut, pool: KvPool, model: ModelInfo, blobs: collections.abc.Sequence[bytes]
) -> _Kept:
    """All KV or none: states can only go on from where they were taken."""
    tokens = sequence.token_ids[: swapped.tokens]
    rows = len(blobs) - len(swapped.rewind_points)
    if rows < 0 or not swapped.rewind_points:
        return None
    try:
        files = check_files(model.kv_identity, model.kv_identity_hash, blobs[:rows], tokens)
        states = [
            check_state(model.kv_identity, model.kv_identity_hash, blob, tokens[:point])
            for blob, point in zip(blobs[rows:], swapped.rewind_points, strict=True)
        ]
        return from_files(pool, files, swapped.tokens, states), swapped.tokens
    except DataLoss:
        logger.warning("swap.damaged")
        return None


def _without_states(
    sequence: Sequence, swapped: SwappedOut, pool: KvPool, model: ModelInfo, blobs: collections.abc.Sequence[bytes]
) -> _Kept:
    while blobs:
        covered = min(len(blobs) * BLOCK_TOKENS, swapped.tokens)
        keep = covered if covered == swapped.tokens else _edge_before(sequence, covered, model.cell_tokens)
        try:
            files = check_files(model.kv_identity, model.kv_identity_hash, blobs, sequence.token_ids[:covered])
            return (from_files(pool, files, keep), keep) if keep else None
        except DataLoss as error:
            logger.warning("swap.damaged")
            blobs = blobs[: min(int(error.metadata.get("blob", "0")), len(blobs) - 1)]
    return None


def _edge_before(sequence: Sequence, tokens: int, cell_tokens: int) -> int:
    """The last position from which the rest of the prompt gets the same bits: an edge of the grid."""
    return tokens if tokens >= sequence.prompt_tokens else tokens // cell_tokens * cell_tokens
