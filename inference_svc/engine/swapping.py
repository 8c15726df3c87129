"""How a turn gives up its rows to others, and how it goes on where it was.

The small parts of such a turn stay: its tokens, its text, its sampler with key and constraint. Its KV leaves as tensor
files, which its listener keeps, and comes back as files from outside, checked like any others. KV that does not come
back is computed again from the tokens, the prompt in its cells and the reply token by token. States are taken where the
turn is; they come back with all of its KV or not at all.
"""

import collections.abc
import logging
from collections.abc import Mapping

from kvasir.errors import DataLoss
from kvasir.formats.block_file import FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.layer_groups import first_touched_block, row_groups
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.beginning import MOST_REWIND_POINTS
from inference_svc.engine.sequence import Sequence, SwappedOut
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_files import files_of, first_whole_block, from_files
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import CheckedFile, check_files, check_state
from inference_svc.model.model_info import ModelInfo

logger = logging.getLogger(__name__)


def most_file_bytes(sequence: Sequence, model: ModelInfo) -> int:
    """Bytes of a turn's files, or somewhat fewer than this; 0 if it has no KV."""
    if not sequence.computed:
        return 0
    size_bytes = sequence.computed * model.kv_bytes_per_token + MOST_REWIND_POINTS * model.state_bytes
    for window, bytes_per_token in model.window_bytes_per_token.items():
        size_bytes += min(sequence.computed, window + BLOCK_TOKENS) * bytes_per_token
    return size_bytes


def swap_out(sequence: Sequence, model: ModelInfo) -> None:
    """Make files of a turn's KV and emit them as `Preempted`. The KV is flushed; the turn gives it up."""
    kv = sequence.kv
    assert kv is not None
    tokens = sequence.token_ids[: sequence.computed]
    chain = chain_hashes(model.kv_identity_hash, tokens, sequence.known_chain)
    if sequence.computed:
        kv.mark()
    first_blocks = {group: first_whole_block(kv, group) for group in row_groups(model.kv_identity)}
    points = tuple(point for point in kv.rewind_points if _is_covered(first_blocks, point))
    identities: list[FileIdentity] = []
    for group, first in first_blocks.items():
        identities += file_identities(model.kv_identity_hash, tokens, chain, first, group)
    if model.has_states:
        identities += [state_identity(model.kv_identity_hash, tokens, point, chain) for point in points]
    files = tuple(files_of(kv, identities))
    sequence.swapped = SwappedOut(sequence.computed, points, first_blocks, sum(map(len, files)))
    kv.release()
    sequence.kv, sequence.known_chain = None, chain
    sequence.preempted(files)


def swap_in(sequence: Sequence, pool: KvPool, model: ModelInfo, blobs: collections.abc.Sequence[bytes]) -> None:
    """Give the turn its KV from its files, or from as many leading ones as arrived whole."""
    swapped, sequence.swapped = sequence.swapped, None
    assert swapped is not None
    restored = _whole if model.has_rewind_points else _leading
    kv, kept = restored(sequence, swapped, pool, model, blobs) or (SequenceKV(pool), 0)
    sequence.kv, sequence.known_chain = kv, sequence.known_chain[: kept // BLOCK_TOKENS]
    sequence.resumed(kept, sequence.shareable)


_Kept = tuple[SequenceKV, int] | None  # KV and its tokens; None if nothing came back


def _is_covered(first_blocks: Mapping[int, int], tokens: int) -> bool:
    return all(first <= first_touched_block(group, tokens) for group, first in first_blocks.items())


def _whole(
    sequence: Sequence, swapped: SwappedOut, pool: KvPool, model: ModelInfo, blobs: collections.abc.Sequence[bytes]
) -> _Kept:
    """All KV or none: states, and the rows of windows, are those of where they were taken."""
    tokens, name, rest = sequence.token_ids[: swapped.tokens], model.kv_identity_hash, list(blobs)
    groups: dict[int, list[CheckedFile]] = {}
    try:
        for group, first in swapped.first_blocks.items():
            count = -(-swapped.tokens // BLOCK_TOKENS) - first
            groups[group] = check_files(model.kv_identity, name, rest[:count], tokens, group, first)
            del rest[:count]
        if len(rest) != (len(swapped.rewind_points) if model.has_states else 0):
            return None
        states = [
            check_state(model.kv_identity, name, blob, tokens[:point])
            for blob, point in zip(rest, swapped.rewind_points if model.has_states else (), strict=True)
        ]
        files = groups.pop(0, [])
        kv = from_files(pool, files, swapped.tokens, states, groups, points=swapped.rewind_points)
    except DataLoss:
        logger.warning("swap.damaged")
        return None
    return kv, swapped.tokens


def _leading(
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
