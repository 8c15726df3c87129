"""A measurement notices a stream that lacks what it measures: a first token, or the turn's end."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from kvasir.inference.v1 import inference_pb2 as pb

from tests.campaigns.sizes.first_token import first_delta
from tests.campaigns.sizes.two_engines import not_durable

_STARTED = pb.GenerateResponse(started=pb.Started(source=pb.CACHE_SOURCE_WARM))
_DELTA = pb.GenerateResponse(delta=pb.Delta(text="a", token_ids=[1]))


def _finished(state: "pb.SnapshotState") -> pb.GenerateResponse:
    return pb.GenerateResponse(finished=pb.Finished(snapshot=pb.SnapshotOutcome(state=state)))


_FINISHED = _finished(pb.SNAPSHOT_STATE_COMMITTED)


async def _stream(*events: pb.GenerateResponse) -> AsyncIterator[pb.GenerateResponse]:
    for event in events:
        await asyncio.sleep(0.01)
        yield event


def test_the_time_of_a_first_token_is_that_of_its_first_delta() -> None:
    first_s, source = asyncio.run(first_delta(_stream(_STARTED, _DELTA, _DELTA, _FINISHED)))
    assert first_s > 0.015
    assert source == pb.CACHE_SOURCE_WARM


def test_a_turn_without_a_token_or_without_its_end_has_no_time() -> None:
    with pytest.raises(AssertionError, match="no token"):
        asyncio.run(first_delta(_stream(_STARTED, _FINISHED)))
    with pytest.raises(AssertionError, match="no token"):
        asyncio.run(first_delta(_stream()))
    with pytest.raises(AssertionError, match="ended with delta"):
        asyncio.run(first_delta(_stream(_STARTED, _DELTA)))


def test_a_memory_is_durable_only_where_a_finished_turn_reports_it() -> None:
    assert asyncio.run(not_durable(_stream(_STARTED, _DELTA, _FINISHED))) == ""
    pending = _finished(pb.SNAPSHOT_STATE_PENDING)
    assert "PENDING" in asyncio.run(not_durable(_stream(_STARTED, _DELTA, pending)))
    assert "without its end" in asyncio.run(not_durable(_stream(_STARTED, _DELTA)))
    assert "without its end" in asyncio.run(not_durable(_stream()))
