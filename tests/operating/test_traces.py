"""One trace through gateway, engine and store, received as a collector receives it; nothing of anybody's text in it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.address import AddressError, check_endpoint
from kvasir.call_context import onward
from kvasir.server.operating.traces import Traces

from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL
from tests.running.trace_collector import Collector, collecting
from tests.running.waiting import eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, int]]:
    with collecting() as found:
        yield found


@pytest.fixture(scope="module")
def traced(collector: tuple[Collector, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    root: Path = tmp_path_factory.mktemp("traced")
    to = ("--traces-to", f"http://127.0.0.1:{collector[1]}")
    with running_front(root, store_options=to, engine_options=to, gateway_options=to) as front:
        yield front


@pytest.fixture(scope="module")
def spans(traced: Front, collector: tuple[Collector, int]) -> dict[tuple[str, str], Any]:
    """Of one request, from the gateway to the store."""
    answer = httpx.post(
        f"{traced.gateway.url}/v1/chat/completions",
        json={"model": MODEL, "messages": [{"role": "user", "content": "I am wudrothi."}], "max_tokens": 4},
        headers={**traced.bearer(), "traceparent": f"00-{TRACE}-b7ad6b7169203331-01", "x-agent-id": "wudrothi"},
        timeout=30,
    )
    assert answer.status_code == 200
    wanted = {
        ("kvasir-gateway", "POST /v1/chat/completions"),
        ("kvasir-engine", _GENERATE),
        *(("kvasir-engine", part) for part in ("queue", "restore", "prefill", "decode", "commit")),
        ("kvasir-store", "CacheStoreService/CommitSnapshot"),
    }
    give_up = time.monotonic() + 20
    while not wanted <= set(found := collector[0].of(TRACE)):
        assert time.monotonic() < give_up, set(found)
        time.sleep(0.1)
    return found


def test_the_spans_of_a_request_have_counts_and_nobodys_text_and_stand_in_their_order(
    spans: dict[tuple[str, str], Any], collector: tuple[Collector, int]
) -> None:
    """They go through gateway, engine and store."""
    gateway, engine = spans["kvasir-gateway", "POST /v1/chat/completions"], spans["kvasir-engine", _GENERATE]
    assert gateway.parent_span_id.hex() == "b7ad6b7169203331"
    assert engine.parent_span_id == gateway.span_id
    parts = [spans["kvasir-engine", part] for part in ("queue", "restore", "prefill", "decode", "commit")]
    assert {part.parent_span_id for part in parts} == {engine.span_id}
    begun = [part.start_time_unix_nano for part in parts]
    assert begun == sorted(begun)
    counts = {pair.key: pair.value.int_value for part in parts for pair in part.attributes}
    assert (counts["completion_tokens"], counts["cached_tokens"]) == (4, 0)
    assert counts["prompt_tokens"] > 4
    assert "wudrothi" not in collector[0].text


_GENERATE = "InferenceService/Generate"


def test_the_store_begins_no_trace_of_its_own(traced: Front, collector: tuple[Collector, int]) -> None:
    with traced.house.store_client() as client:
        client.get_stats()
    httpx.get(f"{traced.gateway.url}/v1/models", headers=traced.bearer())
    eventually(lambda: "GET /v1/models" in collector[0].text, 20)
    assert "CacheStoreService/GetStats" not in collector[0].text


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "http://collector.example:4317", "ftp://127.0.0.1:1", "http://"]
)
def test_traces_go_in_the_clear_to_this_machine_only(endpoint: str) -> None:
    with pytest.raises(AddressError):
        check_endpoint(endpoint)
    assert check_endpoint("https://collector.example:4317")
    assert check_endpoint("http://127.0.0.1:4317")


@pytest.mark.parametrize("scheme", ["https", "http", "ftp"])
def test_a_credential_in_an_endpoint_is_refused_and_not_repeated(scheme: str) -> None:
    with pytest.raises(AddressError, match="no user and no password") as refused:
        check_endpoint(f"{scheme}://user:secret@127.0.0.1:4317")
    assert "secret" not in str(refused.value)


def test_a_call_without_a_trace_is_none_of_the_one_before_it() -> None:
    """Requests that share a connection may share a context: uvicorn begins one where the one before was answered."""
    traces = Traces()
    with traces.serving("first", f"00-{TRACE}-b7ad6b7169203331-01"):
        assert [name for name, _ in onward()] == ["traceparent"]
    with traces.serving("second", ""):
        assert onward() == ()
