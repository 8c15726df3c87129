"""The tensor files that turns leave, and those that they take: of their tokens, whole, and finite."""

import pytest
from kvasir.errors import DataLoss
from kvasir.formats.block_file import FileIdentity, parse_header
from kvasir.formats.block_hash import chain_hash

from inference_svc.engine.api import (
    BlocksFull,
    Hot,
    Restored,
)
from inference_svc.text.token_ids import TokenIds
from tests.inference.engine.driving import Driver, tokens_of


@pytest.mark.long(2)
def test_blocks_may_be_published_while_the_turn_still_runs(driver: Driver) -> None:
    key = driver.key()
    listener = driver.submit(tokens_of(700), key=key, max_tokens=120)
    listener.wait_for(BlocksFull, 2)
    early = driver.engine.memories.snapshot(key, 0, blocks_only=True).result(60)
    late = driver.engine.memories.snapshot(key, 1)  # of the whole turn: waits for its end
    ended = listener.end()
    whole = late.result(60)
    assert early is not None
    assert whole is not None
    assert len(early.blocks) >= 2
    assert early.tail is None
    assert early.blocks[1] == whole.blocks[0]
    assert (whole.first_block, len(whole.blocks), whole.state) == (1, 2, ended.state.computed)
    assert whole.tail is not None
    assert max(event.count for event in listener.events if isinstance(event, BlocksFull)) == 3


def test_tensor_files_report_whose_tokens_they_hold(driver: Driver) -> None:
    key, state = driver.remember(601)
    kv, tokens = driver.engine.model.kv_identity_hash, state.computed.token_ids
    first = chain_hash(kv, "", tokens[:256])
    second = chain_hash(kv, first, tokens[256:512])
    assert [parse_header(data, len(data)).identity for data in driver.files(key)] == [
        FileIdentity("block", kv, 0, 256, first),
        FileIdentity("block", kv, 256, 256, second),
        FileIdentity("tail", kv, 512, 88, chain_hash(kv, second, tokens[512:])),
    ]


def test_a_damaged_file_is_refused_by_index_and_harms_nobody(driver: Driver) -> None:
    key, remembered = driver.remember(700)
    state, files = remembered.computed, driver.files(key)
    for index, data in enumerate(files):
        for damaged in (data[:-1], data + b"\0", data[:200] + b"#" + data[201:], b"", files[index - 1]):
            blobs = (*files[:index], damaged, *files[index + 1 :])
            with pytest.raises(DataLoss) as refused:
                driver.turn((*state.token_ids, 9), Restored(blobs, state.token_ids, 699), driver.key(), max_tokens=1)
            assert refused.value.metadata["blob"] == str(index)
    with pytest.raises(DataLoss):
        driver.turn((*state.token_ids, 9), Restored(files[:2], state.token_ids, 699), driver.key())
    # LESSONS 10: a failed restore must not poison what comes after.
    good = driver.turn((*state.token_ids, 9), driver.restored(key), driver.key())
    assert good.state == driver.turn((*state.token_ids, 9), Hot(699), key).state


def test_kv_that_is_not_finite_never_reaches_the_model(driver: Driver) -> None:
    key, remembered = driver.remember(700)
    state, files = remembered.computed, driver.files(key)
    header = parse_header(files[1], len(files[1]))
    offset = header.data_offset
    for tensor in header.tensors:
        if not tensor.name.endswith("weights"):
            place = offset + tensor.size_bytes - 2
            poisoned = files[1][:place] + b"\x00\x7c" + files[1][place + 2 :]
            restored = Restored((files[0], poisoned, files[2]), state.token_ids, 699)
            with pytest.raises(DataLoss, match="not finite") as refused:
                driver.turn((*state.token_ids, 9), restored, driver.key())
            assert refused.value.metadata["blob"] == "1"
        offset += tensor.size_bytes


def test_files_of_other_tokens_are_refused(driver: Driver) -> None:
    key, remembered = driver.remember(600)
    state = remembered.computed
    swapped = TokenIds([*state.token_ids[:10], state.token_ids[10] ^ 1, *state.token_ids[11:]])
    with pytest.raises(DataLoss, match="chain"):
        driver.turn((*swapped, 9), Restored(driver.files(key), swapped, 599), driver.key())
