"""What operators read: counts that equal what was done, histograms of each part of a turn, and nobody's name."""

import json

import httpx2 as httpx
import pytest
from kvasir.clients import InferenceClient
from kvasir.errors import FailedPrecondition, KvasirError, Unauthenticated
from kvasir.inference.v1 import inference_pb2 as pb

from tests.gateway.serving import MODEL
from tests.operating.conftest import Watched

GREEDY = {"max_tokens": 6, "logit_bias": {2: -100.0}}  # never the end of a reply


@pytest.fixture
def client(watched: Watched) -> InferenceClient:
    return watched.front.house.client(watched.front.keys["ada"])


@pytest.mark.long(2)
def test_counts_and_histograms_equal_what_was_done(watched: Watched, client: InferenceClient) -> None:
    before, stored_before = watched.scrape("engine"), watched.scrape("store")
    first = client.reply(agent_id="ada lovelace", prompt="Dear diary, " * 60, sampling=GREEDY)
    second = client.reply(agent_id="ada lovelace", prompt="Dear diary, " * 60 + "So?", sampling=GREEDY)
    assert second.finished.snapshot.state == pb.SNAPSHOT_STATE_COMMITTED
    after, stored_after = watched.scrape("engine"), watched.scrape("store")

    def grown(name: str, **labels: str) -> float:
        return after(name, **labels) - before(name, **labels)

    for series in ('turn_ends_total{end="moved"}', 'misses_total{reason="manifest_invalid"}'):
        assert f"kvasir_{series} 0.0" in before.text, "a rate misses the first step of a series that was not there"
    tokens = first.finished.usage.completion_tokens + second.finished.usage.completion_tokens
    cached = first.started.cached_tokens + second.started.cached_tokens
    assert tokens == 12
    assert grown("kvasir_turns_total") == grown("kvasir_turn_ends_total", end="finished") == 2
    assert grown("kvasir_sources_total", source="cold") == grown("kvasir_sources_total", source="hot") == 1
    assert grown("kvasir_misses_total", reason="new_agent") == 1
    assert grown("kvasir_decoded_tokens_total") == tokens
    assert grown("kvasir_cached_tokens_total") == cached
    used = [first.finished.usage, second.finished.usage]
    assert grown("kvasir_drafted_tokens_total") == sum(each.drafted_tokens for each in used)
    assert grown("kvasir_accepted_draft_tokens_total") == sum(each.accepted_draft_tokens for each in used)
    prompts = first.started.prompt_tokens + second.started.prompt_tokens
    assert grown("kvasir_prefilled_tokens_total") == prompts - cached
    assert grown("kvasir_queue_seconds_count") == 2
    assert grown("kvasir_first_token_seconds_count") == 2
    assert grown("kvasir_token_gap_seconds_count") == tokens - 2
    assert grown("kvasir_commit_seconds_count") == 2
    assert grown("kvasir_restore_seconds_count") == 0
    waited_s = sum(each.finished.timings.first_token.ToNanoseconds() / 1e9 for each in (first, second))
    assert grown("kvasir_first_token_seconds_sum") == pytest.approx(waited_s, abs=0.002)
    assert grown("kvasir_engine_rpcs_total", rpc="InferenceService/Generate", status="OK") == 2
    commits = "CacheStoreService/CommitSnapshot"
    assert (
        stored_after("kvasir_store_rpcs_total", rpc=commits, status="OK")
        == stored_before("kvasir_store_rpcs_total", rpc=commits, status="OK") + 2
    )
    assert stored_after("kvasir_store_work_total", what="commits") == stored_after(
        "kvasir_store_rpc_seconds_count", rpc=commits
    )
    for page in (after, stored_after):
        assert "lovelace" not in page.text
        assert '"first"' not in page.text  # the namespace


def test_a_refusal_is_no_failure_and_has_a_line_with_its_request(watched: Watched, client: InferenceClient) -> None:
    client.reply(agent_id="by prompt", prompt="Dear diary", sampling=GREEDY)
    before = watched.scrape("engine")
    with pytest.raises(FailedPrecondition) as refused:
        client.reply(
            agent_id="by prompt",
            append_messages=[{"role": "user", "content": "a secret wudrothi"}],
            request_id="turn-4711",
        )
    with pytest.raises(KvasirError):
        client.reply(prompt="a secret wudrothi", sampling={"temperature": -1.0}, request_id="turn-4712")
    after = watched.scrape("engine")
    assert refused.value.reason == "NO_MESSAGES"
    assert after("kvasir_refusals_total", reason="NO_MESSAGES") == 1
    ends = {end: after("kvasir_turn_ends_total", end=end) - before("kvasir_turn_ends_total", end=end) for end in _ENDS}
    assert ends == {"refused": 1, "failed": 0, "finished": 0, "cancelled": 0}
    log = watched.front.house.engine.log
    events = {json.loads(line)["event"] for line in log.splitlines() if line.startswith("{")}
    for request_id, reason in (("turn-4711", "NO_MESSAGES"), ("turn-4712", "INVALID_FIELD")):
        refused_line = f"rpc.refused rpc=InferenceService/Generate request_id={request_id} reason={reason}"
        assert any(event.startswith(refused_line) for event in events)
    assert "wudrothi" not in log


_ENDS = ("refused", "failed", "finished", "cancelled")


def test_a_refused_credential_is_counted_and_logged_and_its_token_is_not(watched: Watched) -> None:
    before = watched.scrape("engine")
    with pytest.raises(Unauthenticated):
        watched.front.house.client("kv-not-a-token-4711").get_stats()
    after = watched.scrape("engine")
    reason = {"reason": "BAD_CREDENTIAL"}
    name = "kvasir_engine_refused_credentials_total"
    assert after(name, **reason) == before(name, **reason) + 1
    log = watched.front.house.engine.log
    assert "credential.refused rpc=InferenceService/GetStats request_id=" in log
    assert "kv-not-a-token-4711" not in log


def test_one_request_has_one_name_in_the_gateway_the_engine_and_the_store(
    watched: Watched, client: InferenceClient
) -> None:
    """The store refuses, the engine hands that on, the gateway answers: each has a line, all of one request."""
    front = watched.front
    headers = {**front.bearer(), "x-request-id": "request-4713"}
    client.reply(agent_id="moved", prompt="Dear diary", sampling=GREEDY)
    asked = {"version": 1, "expected_version": 7}
    answer = httpx.post(f"{front.gateway.url}/v1/agents/moved/rollback", json=asked, headers=headers)
    assert answer.status_code == 409
    for log in (front.gateway.log, front.house.engine.log, front.house.store.log):
        assert "request_id=request-4713" in log


def test_the_gateway_counts_its_answers_by_route_and_names_no_path_of_a_caller(watched: Watched) -> None:
    front, route = watched.front, "/v1/chat/completions"
    before = watched.scrape("gateway")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    for is_streamed in (False, True):
        asked = httpx.post(f"{front.gateway.url}{route}", json=body | {"stream": is_streamed}, headers=front.bearer())
        assert asked.status_code == 200
    assert httpx.post(f"{front.gateway.url}{route}", json=body).status_code == 401
    assert httpx.get(f"{front.gateway.url}/wudrothi").status_code == 404
    assert httpx.get(f"{front.gateway.url}/v1/agents/wudrothi", headers=front.bearer()).status_code == 404
    after = watched.scrape("gateway")
    name = "kvasir_http_requests_total"
    assert after(name, route=route, method="POST", status="200") == 2
    assert after(name, route=route, method="POST", status="401") == 1
    assert after(name, route="none", method="none", status="404") == 1
    assert after(name, route="/v1/agents/{agent_id}", method="GET", status="404") == 1
    assert after("kvasir_http_written_seconds_count") > before("kvasir_http_written_seconds_count")
    assert after("kvasir_http_open_streams") == 0
    assert "wudrothi" not in after.text


@pytest.mark.parametrize("service", ["store", "engine", "gateway"])
def test_each_reports_which_build_it_is(watched: Watched, service: str) -> None:
    labels = watched.scrape(service).labels("kvasir_build_info")
    assert (labels["service"], labels["version"]) == (service, "0.1.0")
    assert labels["device"] == ("" if service != "engine" else labels["device"] or "none")
