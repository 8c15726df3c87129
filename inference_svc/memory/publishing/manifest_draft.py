"""The manifest of a memory, drafted while its last files are written and named: then it has only to name them."""

import asyncio
from collections.abc import Sequence

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.formats import manifest as manifests
from kvasir.formats.digest import Digest

from inference_svc.memory.agent_memory import AgentMemory, StoredFiles, off_loop
from inference_svc.memory.stored_windows import listed_windows
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.token_ids import NO_TOKENS, TokenIds

_LONG_TOKENS = 4_096  # more take half a millisecond or longer


class PackedLine:
    """The token ids and the blocks of a line's last memory as its manifest has them. Those of the next one begin with
    them, and take no millisecond then. From any thread.
    """

    def __init__(self) -> None:
        self._last_ids = NO_TOKENS, b""
        self._last_blocks = manifests.PackedBlocks()

    def ids(self, token_ids: TokenIds) -> bytes:
        known, data = self._last_ids
        if token_ids[: len(known)] != known:
            known, data = NO_TOKENS, b""
        data += manifests.packed(token_ids[len(known) :])
        self._last_ids = token_ids, data
        return data

    def blocks(self, blocks: Sequence[Digest]) -> manifests.PackedBlocks:
        self._last_blocks = packed = manifests.PackedBlocks.of(blocks, self._last_blocks)
        return packed


class ManifestDraft:
    def __init__(self, memory: AgentMemory, model: ModelInfo, packed: PackedLine | None = None) -> None:
        """A draft of a long manifest begins at once, on a thread. If it fails, `completed` raises why. `packed`: of the
        memory's line.
        """
        self._packed = packed or PackedLine()
        self._memory = memory
        self._model = model
        self._tokens = len(memory.transcript.token_ids)
        self._drafting = asyncio.ensure_future(off_loop(self._tokens > _LONG_TOKENS, self._begun))
        self._drafting.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def completed(self, files: StoredFiles) -> tuple[bytes, Digest]:
        """The manifest that names these files, and the version that the memory follows now. Raises InvalidArgument."""
        draft = await asyncio.shield(self._drafting)
        head = self._memory.publication.standing.head
        data = manifests.completed(
            draft,
            blocks=self._packed.blocks(files.blocks),
            tail=files.tail,
            states=sorted(files.states.items()),
            windows=listed_windows(files.windows),
            parent_manifest=head.manifest.hash if head is not None and head.manifest is not None else "",
            asleep=files.asleep,
        )
        return data, Digest.of(data)

    def _begun(self) -> manifests.BegunManifest:
        memory, model, runs = self._memory, self._model, self._memory.files.runs
        ids, chars, text = memory.computed_ids, memory.transcript.token_chars, memory.transcript.text
        spelled = len(text) - chars[len(ids) :].total
        last = memory.transcript.token_ids[len(ids) :]
        return manifests.begun(
            kv_identity=model.kv_identity,
            token_ids=ids,
            packed_ids=self._packed.ids(ids),
            text=text[:spelled],
            token_chars=chars[: len(ids)].packed(),
            pending=manifest_pb2.PendingToken(id=last[0], text=text[spelled:]) if last else None,
            shareable_tokens=memory.shareable_tokens,
            messages=memory.messages,
            tokenizer_digest=model.tokenizer_digest,
            template_digest=model.template_digest,
            turn=memory.turn,
            created_unix_ms=memory.publication.created_unix_ms,
            shortened=memory.shortened,
            template_time_ms=memory.template_time_ms,
            tools_order=memory.tools_order,
            computed=None if runs is None else manifest_pb2.Computed(decoded=runs),
        )
