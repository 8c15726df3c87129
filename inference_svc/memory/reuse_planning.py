"""Plans which KV a prompt reuses: its text is compared with the agent's memory, as tokenizations differ, then its block
hashes with what agents share. What the store cannot give is a miss with its reason.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog
from kvasir.formats.block_file import FileBytes
from kvasir.formats.block_hash import BLOCK_TOKENS, block_hash_chain
from kvasir.formats.digest import Digest
from kvasir.formats.layer_groups import keeps_all_tokens, row_groups
from kvasir.server.shared_room import SharedRoom

from inference_svc.engine.api import Cold, DamagedFile, Hot, Restored, RestoredWindow, Reuse
from inference_svc.engine.engine import Engine
from inference_svc.memory.agent_memory import AgentMemory, StoredFiles, as_hot, off_loop
from inference_svc.memory.outcomes import Miss, MissReason, Source
from inference_svc.memory.recall import Recollection, unknown_token
from inference_svc.memory.restore_costs import RestoreCosts
from inference_svc.memory.reuse_plan import Once, Prepared
from inference_svc.memory.store.answers import StoreMiss
from inference_svc.memory.store.patience import Budget
from inference_svc.memory.store.reading import MOST_BYTES, BackgroundRead
from inference_svc.memory.store.remote_cache import RemoteCache
from inference_svc.memory.stored_windows import FoundPrefix, blocks_seen, covers
from inference_svc.memory.swap_store import may_be_preempted
from inference_svc.model.prompting import Prompting, Tokenized
from inference_svc.text.prefix_matching import (
    NO_MATCH,
    NO_TEXT,
    Outcome,
    PrefixMatch,
    RememberedText,
    match_prefix,
    match_tokens,
)
from inference_svc.text.token_ids import NO_CHARS, NO_TOKENS, TokenChars, TokenIds

_LOG = structlog.get_logger(__name__)
_LONG_TOKENS = 8192  # hashing more tokens than these takes the event loop more than a millisecond or two
FEWEST_RESTORED = 16  # to compute fewer tokens than these takes less time than to get their block from the store


@dataclass(frozen=True, slots=True)
class ComparedPrompt:
    """A prompt that is compared with memories."""

    namespace: str
    text: str
    given: Tokenized | None = None  # its tokens, where it came as tokens; they are compared then, and not the text
    generates: bool = True  # False when only the prompt is computed; then all of it may be reused


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A tokenization of the prompt, and the source of KV for its first `keep` tokens."""

    tokens: Tokenized
    keep: int
    source: Source
    match: PrefixMatch
    known_ids: TokenIds = NO_TOKENS  # tokens of the files below, at least `keep` of them, the first `keep` the prompt's
    shareable_tokens: int = 0
    files: StoredFiles = field(default_factory=StoredFiles)

    def without_kv(self) -> "_Candidate":
        return _Candidate(self.tokens, 0, Source.COLD, self.match)


@dataclass(frozen=True, slots=True)
class Avoid:
    """What of a memory's files may be used after the engine refused others."""

    files: int | None = None  # so many leading tensor files; None: all
    last_rewind_point: int | None = None  # no state behind it; None: all
    has_windows: bool = True
    damage: Miss | None = None  # the newest refusal

    def also(self, refused: DamagedFile) -> tuple["Avoid", str]:
        found, what = replace(self, files=refused.blob), f"tensor file {refused.blob} of the memory"
        if point := refused.state:
            found, what = replace(self, last_rewind_point=point - 1), f"the state of {point} tokens"
        elif refused.window:
            found, what = replace(self, has_windows=False), f"a tensor file of window {refused.window}"
        return replace(found, damage=Miss(MissReason.BLOB_DAMAGED, f"{what} was refused")), what


NOTHING_REFUSED = Avoid()


class ReusePlanner:
    def __init__(
        self, engine: Engine, prompting: Prompting, stores: Mapping[str, RemoteCache], costs: RestoreCosts
    ) -> None:
        """`stores`: the cache store by namespace; a namespace without one has hot memory only."""
        self.costs = costs
        self._engine = engine
        self._prompting = prompting
        self._stores = stores

    def expect(self, namespace: str, recollection: Recollection, room: SharedRoom) -> None:
        """Begin to read the files that a plan will probably reuse, while its prompt is rendered and compared.
        `room`: for bytes that become KV. A plan that takes much of it at once would wait until these files are
        forgotten.
        """
        store, memory = self._stores.get(namespace), recollection.memory
        if store is None or memory is None or recollection.kv_from is not Source.WARM:
            return
        if not self._engine.model.has_rewind_points or memory.files.size_bytes <= room.max_units // 2:
            store.blobs.expect(memory.files.rows, room)

    async def plan(
        self,
        recollection: Recollection,
        prompt: ComparedPrompt,
        budget: Budget,
        hold: Callable[[int], Awaitable[None]],
        avoid: Avoid = NOTHING_REFUSED,
    ) -> Prepared:
        """Compare the prompt with the memory, then with shared blocks, and read the KV that is reused from the store.
        `hold` is awaited with the number of bytes that will be read: the caller gives out the memory for them, and the
        wait for it does not count as the store's time. `avoid`: after the engine's refusals.
        """
        if recollection.kv_from is Source.HOT and recollection.memory is not None:
            recollection = replace(recollection, memory=as_hot(recollection.memory))
        store = self._stores.get(prompt.namespace)
        candidate, miss = await self._candidate(prompt, recollection, avoid, store, budget)
        reuse, reading, read_miss = await self._reuse(candidate, avoid.files, store, budget, hold)
        kept = 0 if isinstance(reuse, Cold) else reuse.keep_tokens
        blocks, windows = kept // BLOCK_TOKENS, candidate.files.windows
        return Prepared(
            text=prompt.text,
            tokens=candidate.tokens,
            kv=Once(reuse),
            source=candidate.source if kept else Source.COLD,
            match=candidate.match.outcome,
            miss=avoid.damage or read_miss or miss,
            stored_blocks=tuple(candidate.files.blocks[:blocks]),
            stored_windows={window: stored.before(blocks) for window, stored in windows.items()},
            shareable_tokens=candidate.shareable_tokens,
            reading=reading,
            can_be_preempted=may_be_preempted(store, recollection.memory, reuse),
            runs=candidate.files.runs,
        )

    async def _candidate(
        self,
        prompt: ComparedPrompt,
        recollection: Recollection,
        avoid: Avoid,
        store: RemoteCache | None,
        budget: Budget,
    ) -> tuple[_Candidate, Miss | None]:
        recollection, candidate = await self._best(prompt, recollection)
        miss = (
            recollection.miss or _text_miss(recollection, candidate.match, prompt.text) or _sleeping_miss(recollection)
        )
        candidate, unstored = self._restorable(candidate, recollection, avoid)
        miss = miss or unstored
        if store is not None and avoid.files is None and avoid.has_windows and not self._engine.model.has_states:
            candidate, shared_miss = await self._by_block_hashes(store, candidate, prompt, budget)
            miss = miss or shared_miss
        candidate, cheaper = await self._cheaper(prompt.namespace, candidate, store)
        return candidate, cheaper or miss

    async def _best(self, prompt: ComparedPrompt, recollection: Recollection) -> tuple[Recollection, _Candidate]:
        """Of the newest memory, an older one and this KV identity's own line, the one that has most of the prompt."""
        candidate = await self._by_text(prompt, recollection)
        if recollection.base is not None:
            older = await self._by_text(prompt, recollection.base)
            if older.keep > candidate.keep:
                recollection, candidate = recollection.base, older
        if (own_line := recollection.own_line) is not None:
            found = await self._by_text(replace(prompt, given=candidate.tokens), own_line)
            if found.keep > candidate.keep:
                return own_line, replace(found, match=candidate.match)
        return recollection, candidate

    def _restorable(
        self, candidate: _Candidate, recollection: Recollection, avoid: Avoid
    ) -> tuple[_Candidate, Miss | None]:
        """The part of a candidate to which states and windows can be restored, and why, if it is less."""
        miss: Miss | None = None
        has_states = self._engine.model.has_states
        if has_states:
            candidate, miss = _at_rewind_point(candidate, recollection.memory, avoid.last_rewind_point)
        if candidate.files.windows and candidate.source is not Source.HOT:  # the engine knows a hot one's rewind points
            lengths = _lengths(candidate, has_states) if avoid.has_windows else []
            candidate, no_windows = _with_stored_windows(candidate, lengths)
            miss = miss or no_windows
        return candidate, miss

    async def _by_text(self, prompt: ComparedPrompt, recollection: Recollection) -> _Candidate:
        memory = recollection.memory
        # Token ids of another tokenizer would spell something else.
        is_ours = memory is not None and (
            recollection.kv_from is not Source.COLD
            or (
                memory.tokenizer_digest == self._engine.model.tokenizer_digest
                and not unknown_token(memory, self._engine.vocabulary_size)
            )
        )
        transcript = memory.transcript if memory is not None and is_ours else NO_TEXT
        text, prompting = prompt.text, self._prompting
        if (given := prompt.given) is not None:
            match, tokens = match_tokens(transcript, given.ids) if transcript.token_ids else NO_MATCH, given
        elif not prompt.generates and transcript.token_ids and transcript.text == text:
            # Nothing follows it, so it need not end at a character's border, and its last token may stay without KV.
            computed = len(memory.computed_ids) if memory is not None else 0
            match = PrefixMatch(Outcome.EXACT, computed, len(text), len(text))
            tokens = Tokenized(transcript.token_ids[:computed], transcript.token_chars[:computed])
        else:
            match, tokens = await prompting.run(prompt.namespace, lambda: matched(prompting, transcript, text))
        # A generating turn computes at least one token, because its logits give the next token.
        most = len(tokens.ids) - (1 if prompt.generates else 0)
        has_kv = recollection.kv_from is not Source.COLD and not _is_asleep(recollection)
        known_ids = memory.computed_ids if memory is not None else NO_TOKENS
        keep = min(match.kept_tokens, most, len(known_ids)) if has_kv else 0
        fewest = FEWEST_RESTORED if recollection.kv_from is Source.WARM else 1
        if memory is None or keep < fewest:
            return _Candidate(tokens, 0, Source.COLD, match)
        source = recollection.kv_from
        return _Candidate(tokens, keep, source, match, known_ids, memory.shareable_tokens, memory.files)

    async def _by_block_hashes(
        self, store: RemoteCache, candidate: _Candidate, prompt: ComparedPrompt, budget: Budget
    ) -> tuple[_Candidate, Miss | None]:
        """Blocks in the store that a cold run would compute, if they cover at least one block beyond the candidate."""
        if len(candidate.tokens.ids) - 1 - candidate.keep < BLOCK_TOKENS:
            return candidate, None
        tokens = candidate.tokens
        if candidate.match.kept_tokens and prompt.given is None:
            tokens = await self._prompting.run(prompt.namespace, lambda: self._prompting.tokenize(prompt.text))
        kv_identity_hash, cell = self._engine.model.kv_identity_hash, self._engine.model.cell_tokens
        try:
            hashes = await off_loop(
                len(tokens.ids) > _LONG_TOKENS,
                lambda: block_hash_chain(prompt.namespace, kv_identity_hash, tokens.ids[: len(tokens.ids) - 1]),
            )
            groups = row_groups(self._engine.model.kv_identity)
            found = await store.blobs.find_prefix(kv_identity_hash, hashes, groups, budget) if hashes else FoundPrefix()
            # Whole cells: from a cell's edge on, the rest is prefilled exactly as in a cold run.
            while found.tokens % cell:
                hashes = hashes[: found.tokens // cell * cell // BLOCK_TOKENS]
                found = await store.blobs.find_prefix(kv_identity_hash, hashes, groups, budget)
        except StoreMiss as error:
            return candidate, error.miss
        keep = found.tokens
        if keep < candidate.keep + BLOCK_TOKENS:
            return candidate, None
        files = StoredFiles(list(found.blocks), windows=dict(found.windows), runs=())
        return _Candidate(tokens, keep, Source.SHARED, candidate.match, tokens.ids, keep, files), None

    async def _cheaper(
        self, namespace: str, candidate: _Candidate, store: RemoteCache | None
    ) -> tuple[_Candidate, Miss | None]:
        """The candidate, or none where computing is faster: only of rows that every prefill makes alike."""
        is_stored = candidate.source in (Source.WARM, Source.SHARED)
        is_exact = candidate.keep <= candidate.shareable_tokens and not self._engine.model.has_rewind_points
        if store is None or not is_stored or not is_exact:
            return candidate, None
        blocks = candidate.files.blocks[: -(-candidate.keep // BLOCK_TOKENS)]
        size_bytes = sum(digest.size_bytes for digest in blocks)
        cached, from_disk = (
            self.costs.reason_to_compute(namespace, candidate.keep, size_bytes, from_disk=each)
            for each in (False, True)
        )
        # Nobody looks where that decides nothing: nearly always both are cheap, or not known.
        why = cached if cached == from_disk or await store.blobs.are_cached(blocks) else from_disk
        if why is None:
            return candidate, None
        _LOG.info("restore.not_chosen", reason=why.detail)
        return candidate.without_kv(), why

    async def _reuse(
        self,
        candidate: _Candidate,
        usable_files: int | None,
        store: RemoteCache | None,
        budget: Budget,
        hold: Callable[[int], Awaitable[None]],
    ) -> tuple[Reuse, BackgroundRead | None, Miss | None]:
        """The KV that can be reused: of the store's files, as many leading ones as arrive whole."""
        if candidate.source is Source.HOT:
            return Hot(candidate.keep), None, None
        if candidate.source is Source.COLD or store is None:
            return Cold(), None, None
        wanted = candidate.files.rows[: -(-candidate.keep // BLOCK_TOKENS)][:usable_files]
        # All room is requested at once: turns that hold room and wait for more could wait for each other.
        has_states = self._engine.model.has_states
        beside = {keep: _beside_blocks(candidate, keep, has_states) for keep in _lengths(candidate, has_states)}
        rest_bytes = [sum(digest.size_bytes for digest in named) for named in beside.values()]
        size_bytes = sum(digest.size_bytes for digest in wanted) + max(rest_bytes, default=0)
        if not self._engine.model.has_rewind_points:
            await hold(min(size_bytes, MOST_BYTES))
            return await self._arriving(candidate, wanted, store, budget)
        await hold(size_bytes)
        blobs, miss = await store.blobs.read_blobs(wanted, budget) if wanted else ([], None)
        # Which files of windows are read, and which state, depends on how many of these came.
        if keeps_all_tokens(self._engine.model.kv_identity):
            # The last file is full, or a tail that holds all the rest.
            candidate = replace(candidate, keep=min(candidate.keep, len(blobs) * BLOCK_TOKENS))
        gone: set[Digest] = set()
        for keep in _lengths(candidate, has_states):
            named = beside.get(keep, [])
            if gone.isdisjoint(named):
                found, rest_miss = await store.blobs.read_blobs(named, budget) if named else ([], None)
                miss = miss or rest_miss
                if len(found) == len(named):
                    return self._restored(candidate, keep, blobs, found), None, miss
                gone.add(named[len(found)])
        return Cold(), None, miss

    async def _arriving(
        self, candidate: _Candidate, wanted: Sequence[Digest], store: RemoteCache, budget: Budget
    ) -> tuple[Reuse, BackgroundRead | None, Miss | None]:
        """Files that the engine takes as they come. The turn takes no room in the engine before the first."""
        keep = min(candidate.keep, len(wanted) * BLOCK_TOKENS)
        if not keep:
            return Cold(), None, None
        reading = BackgroundRead(store, wanted, budget)
        if not await reading.begun():
            return Cold(), None, reading.miss
        known_ids = candidate.known_ids[: len(wanted) * BLOCK_TOKENS]
        restored = Restored((), known_ids, keep, candidate.shareable_tokens, incoming=reading.incoming)
        return restored, reading, None

    def _restored(
        self, candidate: _Candidate, keep: int, blobs: Sequence[FileBytes], beside: Sequence[FileBytes]
    ) -> Restored:
        """The first `keep` tokens, of which all files were read: those of `_beside_blocks` are in its order."""
        rest = iter(beside)
        places = {window: blocks_seen(window, keep) for window in candidate.files.windows}
        windows = tuple(
            RestoredWindow(window, blocks.start, tuple(islice(rest, len(blocks)))) for window, blocks in places.items()
        )
        has_rows = bool(blobs or windows)
        known = min(-(-keep // BLOCK_TOKENS) * BLOCK_TOKENS, len(candidate.known_ids)) if has_rows else keep
        return Restored(
            blobs=tuple(blobs[: -(-keep // BLOCK_TOKENS)]),
            token_ids=candidate.known_ids[:known],
            keep_tokens=keep,
            shareable_tokens=0 if self._engine.model.has_states else candidate.shareable_tokens,
            state=next(rest, None),
            windows=windows,
        )


def matched(prompting: Prompting, transcript: RememberedText, text: str) -> tuple[PrefixMatch, Tokenized]:
    """A prompt beside a memory, and its tokens: those of the memory that are kept, and of the text behind them."""
    match = match_prefix(transcript, text, ends_whole=prompting.ends_whole) if transcript.token_ids else NO_MATCH
    kept, rest = match.kept_tokens, text[match.kept_chars :]
    ids, chars = transcript.token_ids[:kept], transcript.token_chars[:kept]
    behind = prompting.tokenize(rest, ids[-1] if kept else None) if rest else Tokenized(NO_TOKENS, NO_CHARS)
    if kept and rest and not behind.ids:  # characters that the tokenizer leaves out
        chars = chars[:-1] + TokenChars((chars[-1] + len(rest),))
    return match, Tokenized(ids, chars) + behind


def _lengths(candidate: _Candidate, has_states: bool) -> list[int]:
    """The lengths that the candidate's files can be restored to, longest first: rewind points, or borders of blocks."""
    borders = range(0, candidate.keep, BLOCK_TOKENS) if candidate.files.windows else ()
    points = candidate.files.states if has_states else (*borders, candidate.keep)
    lengths = {point for point in points if 0 < point <= candidate.keep and covers(candidate.files.windows, point)}
    return sorted(lengths, reverse=True)


def _beside_blocks(candidate: _Candidate, keep: int, has_states: bool) -> list[Digest]:
    """The files of windows, and the state, that the first `keep` tokens need."""
    seen = [(stored, blocks_seen(window, keep)) for window, stored in candidate.files.windows.items()]
    named = [stored.files[block] for stored, blocks in seen for block in blocks]
    return [*named, candidate.files.states[keep]] if has_states else named


def _with_stored_windows(candidate: _Candidate, lengths: Sequence[int]) -> tuple[_Candidate, Miss | None]:
    """The longest part of a candidate whose windows are stored (at these lengths alone), and a miss if it is less."""
    if lengths[:1] == [candidate.keep]:
        return candidate, None
    miss = Miss(MissReason.NO_STATE_POINT, f"the windows of {candidate.keep} tokens are not stored")
    keep = max(lengths, default=0)
    return (replace(candidate, keep=keep) if keep else candidate.without_kv()), miss


def _at_rewind_point(
    candidate: _Candidate, memory: AgentMemory | None, usable_rewind_point: int | None
) -> tuple[_Candidate, Miss | None]:
    """The candidate, cut to the last rewind point that the memory has; and the miss, if that cuts anything."""
    if memory is None or not candidate.keep:
        return candidate, None
    most = candidate.keep if usable_rewind_point is None else min(candidate.keep, usable_rewind_point)
    point = max((point for point in memory.rewind_points if point <= most), default=0)
    if point == candidate.keep:
        return candidate, None
    miss = Miss(MissReason.NO_STATE_POINT, f"the text matches {candidate.keep} tokens, states go back to {point}")
    return (replace(candidate, keep=point) if point else candidate.without_kv()), miss


def _text_miss(recollection: Recollection, match: PrefixMatch, text: str) -> Miss | None:
    memory = recollection.memory
    if memory is None or (match.kept_tokens and match.matched_chars in (len(text), len(memory.transcript.text))):
        return None  # one text is a prefix of the other
    detail = f"the prompt differs from the memory at character {match.matched_chars} of {len(memory.transcript.text)}"
    return Miss(MissReason.TEXT_DIFFERS, detail)


def _is_asleep(recollection: Recollection) -> bool:
    """Whether the memory's KV is nowhere: a hot memory that is asleep in the store was woken."""
    memory = recollection.memory
    return memory is not None and memory.files.asleep is not None and recollection.kv_from is Source.WARM


def _sleeping_miss(recollection: Recollection) -> Miss | None:
    if not _is_asleep(recollection):
        return None
    return Miss(MissReason.BLOB_MISSING, "the agent is asleep, and its KV has no room here to be computed as it was")
