"""How a turn gives up its rows to others, and goes on where it was: its KV leaves as tensor files and comes back as
files from outside, checked like any others. KV that does not come back is computed again, the prompt in its cells and
the reply token by token; states come back with all of its KV or not at all.
"""

import logging
from collections.abc import Callable

from kvasir.formats.block_file import FileBytes, FileIdentity
from kvasir.formats.block_hash import BLOCK_TOKENS, chain_hashes
from kvasir.formats.layer_groups import first_touched_block, row_groups
from kvasir.formats.token_files import file_identities, state_identity

from inference_svc.engine.beginning import MOST_REWIND_POINTS
from inference_svc.engine.files.incoming import ArrivingFiles, Incoming
from inference_svc.engine.sequence import Sequence, SwappedOut
from inference_svc.kv.damage import DamagedFile
from inference_svc.kv.kv_load import KvLoad
from inference_svc.kv.pages.pool import KvPool
from inference_svc.kv.sequence_files import files_of, first_whole_block
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.kv.tensor_files import CheckedFile, FileChecks, check_files, check_state
from inference_svc.model.model_info import ModelInfo

logger = logging.getLogger(__name__)


def most_file_bytes(sequence: Sequence, model: ModelInfo) -> int:
    """Bytes of a turn's files, or somewhat fewer than this; 0 if it has no KV."""
    if not sequence.cells.computed:
        return 0
    size_bytes = sequence.cells.computed * model.kv_bytes_per_token + MOST_REWIND_POINTS * model.state_bytes
    for window, bytes_per_token in model.window_bytes_per_token.items():
        size_bytes += min(sequence.cells.computed, window + BLOCK_TOKENS) * bytes_per_token
    return size_bytes


def swap_out(sequence: Sequence, model: ModelInfo) -> None:
    """Make files of a turn's KV and emit them as `Preempted`. The KV is flushed; the turn gives it up."""
    kv = sequence.kv
    assert kv is not None
    sequence.swapped, files = at_rest(sequence, kv, model)
    kv.release()
    sequence.kv = None
    sequence.preempted(files)


def files_stored(sequence: Sequence) -> None:
    """The files of a preempted turn have left this process."""
    if sequence.swapped is not None:
        sequence.swapped.unstored_bytes = 0


def at_rest(
    sequence: Sequence, kv: SequenceKV, model: ModelInfo, sent_blocks: int = 0
) -> tuple[SwappedOut, tuple[FileBytes, ...]]:
    """What is known of a turn's files, and the files, but for the first `sent_blocks`. `kv` gets a rewind point."""
    tokens = sequence.token_ids[: sequence.cells.computed]
    chain = sequence.known_chain = chain_hashes(model.kv_identity_hash, tokens, sequence.known_chain)
    if sequence.cells.computed:
        kv.mark()
    first_blocks = {group: first_whole_block(kv, group) for group in row_groups(model.kv_identity)}
    points = tuple(
        point
        for point in kv.rewind_points
        if all(first <= first_touched_block(group, point) for group, first in first_blocks.items())
    )
    identities: list[FileIdentity] = []
    for group, first in first_blocks.items():
        left_out = 0 if group else sent_blocks
        identities += file_identities(model.kv_identity_hash, tokens, chain, first + left_out, group)
    if model.has_states:
        identities += [state_identity(model.kv_identity_hash, tokens, point, chain) for point in points]
    files = tuple(files_of(kv, identities))
    return SwappedOut(sequence.cells.computed, points, first_blocks, sum(map(len, files))), files


class SwapIn:
    """A preempted turn's KV on its way back (`Arrival`) from its files, or from as many leading ones as come whole."""

    def __init__(self, sequence: Sequence, pool: KvPool, model: ModelInfo, files: Incoming) -> None:
        """`files` are kept: after a damaged one the others serve again."""
        assert sequence.swapped is not None
        self._sequence = sequence
        self._swapped = sequence.swapped
        self._pool = pool
        self._model = model
        self._files = files
        self._has_begun = False
        self.load = KvLoad(SequenceKV(pool), (), 0)  # until the first files are there

    @property
    def lacks_files(self) -> bool:
        if self._files.has_ended:
            return False
        # Rows of windows, and states, are those of where they were taken: of such a model all files are needed.
        return self.load.lacks_files if self._has_begun else self._model.has_rewind_points or not self._files.ready

    def advance(self, most_files: int, meanwhile: Callable[[], None]) -> None:
        try:
            if not self._has_begun:
                self.load, self._has_begun = self._begun(), True
            if self._files.has_ended and self._files.ready < self._files.expected:
                self.load.cut(self._kept(self._files.ready))
            if not self.load.advance(most_files, meanwhile):
                return
        except DamagedFile as error:
            self._leave_out(error)
            self.load = self._begun()
            return
        sequence, kept = self._sequence, self.load.kv.length
        # Not where it stopped: the turn has no room for the pages and states of one more.
        self.load.kv.keep_rewind_points({sequence.cells.cached, sequence.cells.rewind_point})
        sequence.kv, sequence.swapped = self.load.kv, None
        sequence.known_chain = sequence.known_chain[: kept // BLOCK_TOKENS]
        sequence.resumed(kept)

    def _begun(self) -> KvLoad:
        while self._files.expected:
            try:
                return self._whole() if self._model.has_rewind_points else self._leading()
            except DamagedFile as error:
                self._leave_out(error)
        return KvLoad(SequenceKV(self._pool), (), 0)

    def _leave_out(self, error: DamagedFile) -> None:
        logger.warning("swap.damaged")
        damaged = 0 if self._model.has_rewind_points else error.blob
        self._files = self._files.leading(min(damaged, self._files.expected - 1))

    def _whole(self) -> KvLoad:
        """All KV: states, and the rows of windows, are those of where they were taken. Raises DamagedFile."""
        swapped, identity, name = self._swapped, self._model.kv_identity, self._model.kv_identity_hash
        tokens, rest = self._sequence.token_ids[: swapped.tokens], list(map(self._files.take, range(self._files.ready)))
        groups: dict[int, list[CheckedFile]] = {}
        for group, first in swapped.first_blocks.items():
            count = -(-swapped.tokens // BLOCK_TOKENS) - first
            groups[group] = check_files(identity, name, rest[:count], tokens, group, first)
            del rest[:count]
        points = swapped.rewind_points if self._model.has_states else ()
        if len(rest) != len(points):
            raise DamagedFile(f"expected {len(points)} state files, got {len(rest)}")
        states = [check_state(identity, name, blob, tokens[:point]) for blob, point in zip(rest, points, strict=True)]
        files = groups.pop(0, [])
        kv = SequenceKV(self._pool)
        return KvLoad(kv, files, swapped.tokens, states, groups, points=swapped.rewind_points)

    def _leading(self) -> KvLoad:
        """As many leading tokens as the files cover that are expected. Raises DamagedFile."""
        model, files = self._model, self._files.expected
        tokens = self._sequence.token_ids[: min(files * BLOCK_TOKENS, self._swapped.tokens)]
        checks = FileChecks(model.kv_identity, model.kv_identity_hash, tokens)
        return KvLoad(SequenceKV(self._pool), ArrivingFiles(self._files, checks), self._kept(files))

    def _kept(self, files: int) -> int:
        """The last position that these files reach from which the rest gets the same bits."""
        covered, cell = min(files * BLOCK_TOKENS, self._swapped.tokens), self._model.cell_tokens
        is_whole = covered == self._swapped.tokens or covered >= self._sequence.cells.prompt_tokens
        return covered if is_whole else covered // cell * cell
