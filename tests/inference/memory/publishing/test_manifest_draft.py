"""A manifest that was drafted before its files were named is that of the memory as it is stored."""

import asyncio
import gc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvasir.formats import manifest as manifests
from kvasir.formats.digest import Digest

from inference_svc.memory.agent_memory import StoredFiles
from inference_svc.memory.publishing.manifest_draft import ManifestDraft, PackedLine
from inference_svc.memory.store.answers import NO_HEAD, Head
from inference_svc.text.token_ids import TokenIds
from tests.inference.memory.publication_world import Engine, remembered

MODEL = Engine().model


def files_of(tokens: int, name: str) -> StoredFiles:
    digests = [Digest.of(f"{name} {block}".encode()) for block in range(tokens // 256 + 1)]
    return StoredFiles(digests[:-1], digests[-1])


@pytest.mark.parametrize("tokens", [300, 5_000])  # at once, drafted on a thread
async def test_a_draft_names_the_files_and_the_parent_that_its_memory_has_in_the_end(tokens: int) -> None:
    memory, parent = remembered("a" * tokens, NO_HEAD), Head(3, Digest.of(b"the version before"), 2)
    draft = ManifestDraft(memory, MODEL)
    lost, data = await draft.completed(files_of(tokens, "lost")), b""
    memory.publication.standing = remembered("", parent).publication.standing
    data, digest = await draft.completed(files_of(tokens, "sent again"))
    files, standing = files_of(tokens, "sent again"), memory.publication.standing
    assert standing.head is parent
    assert parent.manifest is not None
    stored = manifests.build(
        kv_identity=MODEL.kv_identity,
        token_ids=[1] * tokens,
        text="a" * tokens,
        token_chars=[1] * tokens,
        blocks=files.blocks,
        tail=files.tail,
        turn=memory.turn,
        parent_manifest=parent.manifest.hash,
        created_unix_ms=0,
    )
    assert manifests.parse(data) == manifests.parse(stored)
    assert digest == Digest.of(data) != lost[1]


async def test_a_draft_that_cannot_be_made_is_refused_when_its_files_are_named_and_else_nobody_hears_of_it() -> None:
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, about: wrong.append(about))
    for is_needed in (True, False):
        draft = ManifestDraft(remembered("\ud800", NO_HEAD), MODEL)  # no text of a memory can have it
        await asyncio.sleep(0)
        if is_needed:
            with pytest.raises(UnicodeEncodeError):
                await draft.completed(files_of(1, "a"))
        del draft
        await asyncio.sleep(0)
        gc.collect()
    assert wrong == []


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, (1 << 32) - 1), max_size=4)), max_size=6))
def test_token_ids_are_packed_as_those_of_a_line_that_nobody_knew(turns: list[tuple[int, list[int]]]) -> None:
    line, ids = PackedLine(), TokenIds()
    for cut, more in turns:  # each goes on from the last one, or from a place in it
        ids = ids[: len(ids) - cut] + TokenIds(more) if cut < 9 else TokenIds(more)
        assert line.ids(ids) == manifests.packed(list(ids))


@given(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=4)), max_size=6))
def test_blocks_are_packed_as_those_of_a_line_that_nobody_knew(turns: list[tuple[int, list[int]]]) -> None:
    line, blocks = PackedLine(), list[Digest]()
    for cut, more in turns:
        blocks[len(blocks) - cut if cut < 5 else 0 :] = (Digest.of(b"%d" % number) for number in more)
        assert line.blocks(blocks) == manifests.PackedBlocks.of(blocks)
