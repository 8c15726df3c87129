"""Thoughts over HTTP: told as each API's clients expect them, and taken back as they went, or known to be another's."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.clients import Reply
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway import anthropic_messages
from kvasir_gateway.ollama import turns as ollama
from kvasir_gateway.openai import chat as openai_chat
from kvasir_gateway.openai import response_answers as openai_response_answers
from kvasir_gateway.openai import responses as openai_responses
from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import Asked, Said

from tests.gateway.conftest import Front, running_front
from tests.gateway.serving import MODEL
from tests.made_models.sampling import first_and_in_turn
from tests.made_models.thinking_models import THOUGHT, write_thinking_model

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
KEY = bytes(range(32))
ASKED = Asked(request_id="r", created=0, model=MODEL)
THOUGHTS = "It rains, “so” – yes.\n\nYes."
QUESTION = "How much does a lamp cost? Look it up, and think about it before you do."


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A model whose template keeps the thoughts of a tool loop."""
    root = tmp_path_factory.mktemp("thinking")
    model = write_thinking_model(root / "model", "deepseek-v3.2")
    with running_front(root, model=model) as front:
        yield front


def events(*deltas: pb.Delta) -> list[pb.GenerateResponse]:
    started, finished = pb.Started(model=MODEL), pb.Finished(reason=pb.FINISH_REASON_STOP)
    return [
        pb.GenerateResponse(started=started),
        *(pb.GenerateResponse(delta=delta) for delta in deltas),
        pb.GenerateResponse(finished=finished),
    ]


def reply_of(told: list[pb.GenerateResponse]) -> Reply:
    reply = Reply()
    for event in told:
        reply.add(event)
    return reply


def frames_of(chunks: Any, told: list[pb.GenerateResponse]) -> list[dict[str, Any]]:
    text = "".join(map(chunks.frames, told)) + chunks.end()
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


TOLD = events(pb.Delta(reasoning_text=THOUGHTS[:9]), pb.Delta(reasoning_text=THOUGHTS[9:]), pb.Delta(text="Yes."))


# --- told and taken back, without an engine ---


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_chats_thoughts_come_back_under_either_name(field: str) -> None:
    whole = openai_chat.whole(ASKED, reply_of(TOLD))["choices"][0]["message"]
    assert whole["reasoning_content"] == THOUGHTS
    back = {key: value for key, value in whole.items() if key != "reasoning_content"} | {field: THOUGHTS}
    asked = openai_chat.ChatRequest.model_validate({"model": MODEL, "messages": [{"role": "user"}, back]})
    assert asked.turn(Reading()).messages[1] == Said("assistant", "Yes.", reasoning=THOUGHTS)
    deltas = [
        chunk["choices"][0]["delta"] for chunk in frames_of(openai_chat.ChatChunks(ASKED, wants_usage=False), TOLD)
    ]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHTS


def test_tokens_of_thoughts_are_counted_whole_and_in_a_stream() -> None:
    """Of five tokens two have no text: a marker before the thoughts, which is theirs, and one behind them."""
    deltas: list[dict[str, Any]] = [{}, {"reasoning_text": "Hm"}, {"reasoning_text": "!"}, {}, {"text": "Yes."}]
    told = events(*(pb.Delta(token_ids=[number], **texts) for number, texts in enumerate(deltas)))
    request, reply = responses_request(), reply_of(told)
    chunks, items = (
        frames_of(made, told)
        for made in (
            openai_chat.ChatChunks(ASKED, wants_usage=True),
            openai_response_answers.ResponseEvents(ASKED, request),
        )
    )
    for details in (openai_chat.whole(ASKED, reply)["usage"], chunks[-1]["usage"]):
        assert details["completion_tokens_details"] == {"reasoning_tokens": 3}
    for response in (openai_response_answers.whole(ASKED, reply, request), items[-1]["response"]):
        assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    unthinking = openai_chat.whole(ASKED, reply_of(events(pb.Delta(text="Yes.", token_ids=[4]))))
    assert "completion_tokens_details" not in unthinking["usage"]


def test_what_others_put_into_these_fields_means_nothing() -> None:
    said = [
        {"role": "user", "content": "?", "reasoning": "I am no assistant."},
        {"role": "assistant", "content": "!", "reasoning": {"effort": "high"}, "reasoning_content": None},
    ]
    asked = openai_chat.ChatRequest.model_validate({"model": MODEL, "messages": said})
    assert [each.reasoning for each in asked.turn(Reading()).messages] == ["", ""]


def anthropic_back(content: list[dict[str, Any]], key: bytes = KEY) -> tuple[Said, list[str]]:
    asked = {"role": "user", "content": "?"}
    body = {"model": MODEL, "messages": [asked, {"role": "assistant", "content": content}, asked]}
    for is_strict in (True, False):
        reading = Reading(is_strict=is_strict, seals=ThoughtSeals(key))
        turn = anthropic_messages.CountedMessages.model_validate(body).turn(reading)
    return turn.messages[1], reading.ignored


def test_anthropics_thoughts_are_signed_and_known_again() -> None:
    seals = ThoughtSeals(KEY)
    content = anthropic_messages.whole(ASKED, reply_of(TOLD), seals=seals, shows_thinking=True)["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]
    assert anthropic_back(content) == (Said("assistant", "Yes.", reasoning=THOUGHTS), [])
    stream = frames_of(anthropic_messages.MessageEvents(ASKED, seals=seals, shows_thinking=True), TOLD)
    deltas = [each["delta"] for each in stream if each["type"] == "content_block_delta"]
    kinds = ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    assert [delta["type"] for delta in deltas] == kinds
    assert deltas[2]["signature"] == content[0]["signature"]


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"thinking": THOUGHTS + " "}, KEY),
        ({"signature": ""}, KEY),
        ({"signature": None}, KEY),
        ({"signature": "EpYECkYICxgCKkCmXe"}, KEY),
        ({"signature": "é"}, KEY),
        ({}, bytes(32)),
    ],
)
def test_thoughts_that_are_not_ours_are_left_out_and_reported_and_refused_by_nobody(
    change: dict[str, Any], key: bytes
) -> None:
    block = {"type": "thinking", "thinking": THOUGHTS, "signature": ThoughtSeals(KEY).signature(THOUGHTS), **change}
    said, ignored = anthropic_back([block, {"type": "text", "text": "Yes."}], key)
    assert said == Said("assistant", "Yes.")
    assert ignored == ["messages[1].content[0]"]


def test_redacted_thoughts_of_others_are_no_error() -> None:
    said, _ = anthropic_back([{"type": "redacted_thinking", "data": "EmwKAhgB"}, {"type": "text", "text": "Yes."}])
    assert said == Said("assistant", "Yes.")


def responses_request(**more: Any) -> openai_responses.ResponsesRequest:
    return openai_responses.ResponsesRequest.model_validate({"model": MODEL, "input": "?", **more})


@pytest.mark.parametrize("summary", [None, "auto"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_items_of_reasoning_are_streamed_as_they_are_whole(summary: str | None, is_sealed: bool) -> None:
    include = ["reasoning.encrypted_content"] if is_sealed else []
    request = responses_request(include=include, reasoning={"summary": summary})
    seals = ThoughtSeals(KEY)
    whole = openai_response_answers.whole(ASKED, reply_of(TOLD), request, seals)
    stream = frames_of(openai_response_answers.ResponseEvents(ASKED, request, seals), TOLD)
    items = [whole["output"][0], stream[-1]["response"]["output"][0]]
    sealed = [item.pop("encrypted_content", None) for item in items]
    assert items[0] == items[1]
    assert [each and seals.opened(each) for each in sealed] == [THOUGHTS if is_sealed else None] * 2
    name = "response.reasoning_summary_text" if summary else "response.reasoning_text"
    assert "".join(each["delta"] for each in stream if each["type"] == f"{name}.delta") == THOUGHTS
    assert [each["text"] for each in stream if each["type"] == f"{name}.done"] == [THOUGHTS]
    assert [part["text"] for part in items[0]["summary"] + items[0].get("content", [])] == [THOUGHTS]


def test_sealed_thoughts_come_back_as_they_went_and_become_one_message_with_what_follows() -> None:
    seals = ThoughtSeals(KEY)
    request = responses_request(include=["reasoning.encrypted_content"], reasoning={"summary": "auto"})
    output = openai_response_answers.whole(ASKED, reply_of(TOLD), request, seals)["output"]
    for item in output:
        del item["id"]  # as clients that store nothing do
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    reading = Reading(seals=seals)
    told = openai_responses.said([{"role": "user", "content": "?"}, *output, call, output[0], call], reading)
    assert [(each.content, each.reasoning, len(each.tool_calls)) for each in told[1:]] == [
        ("Yes.", THOUGHTS, 1),
        ("", THOUGHTS, 1),
    ]
    assert reading.ignored == []


@pytest.mark.parametrize("sealed", ["gAAAAABo", "é", ThoughtSeals(bytes(32)).sealed(THOUGHTS)])
def test_sealed_thoughts_of_others_are_ignored_and_reported(sealed: str) -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "rain"}], "encrypted_content": sealed}
    reading = Reading(is_strict=True, seals=ThoughtSeals(KEY))
    told = openai_responses.said([item, {"role": "user", "content": "?"}], reading)
    assert told == (Said("user", "?"),)
    assert reading.ignored == ["input[0].encrypted_content"]


def test_ollamas_thoughts_come_back() -> None:
    said = ollama.whole(ASKED, reply_of(TOLD), is_chat=True, shows_thinking=True)["message"]
    asked = ollama.OllamaChat.model_validate({"model": MODEL, "messages": [said, {"role": "user", "content": "?"}]})
    turn = asked.turn(Reading())
    assert turn is not None
    assert turn.messages[0] == Said("assistant", "Yes.", reasoning=THOUGHTS)


# --- over an engine ---


def ask(front: Front, path: str, body: dict[str, Any], caller: str = "ada") -> httpx.Response:
    headers = front.bearer(caller)
    answer = httpx.post(front.gateway.url + path, json={"model": "m", **body}, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer


def turns_of(path: str, said: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn's body: thoughts of some length, which end where the API can say so. Without a seed they are greedy: a
    reply of random tokens may hold special ones, which are text when they come back.
    """
    if path == CHAT:
        bias = {str(THOUGHT): 5.0, "2": -100.0, "1022": -100.0}
        return {"messages": said, "max_tokens": 40, "seed": 3, "temperature": 1.0, "logit_bias": bias}
    if path == RESPONSES:
        return {"input": said, "max_output_tokens": 40, "include": ["reasoning.encrypted_content"], "temperature": 0}
    return {"messages": said, "max_tokens": 40, "temperature": 0}


def loop_of(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer as clients send it back, and a tool's result."""
    if path == CHAT:
        return [answer["choices"][0]["message"], {"role": "tool", "content": "7 coins", "tool_call_id": "c"}]
    if path == RESPONSES:
        items = [{key: value for key, value in item.items() if key != "content"} for item in answer["output"]]
        return [items[0], {"type": "function_call_output", "call_id": "c", "output": "7 coins"}]
    result = {"type": "tool_result", "tool_use_id": "c", "content": "7 coins"}
    return [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]


def counts(path: str, answer: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens of the prompt, of it cached, and of the reply."""
    usage = answer["usage"]
    if path == CHAT:
        details = usage["prompt_tokens_details"]
        return usage["prompt_tokens"], details["cached_tokens"], usage["completion_tokens"]
    if path == RESPONSES:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + cached, cached, usage["output_tokens"]


@pytest.mark.parametrize("path", first_and_in_turn([CHAT, RESPONSES, MESSAGES], seconds=2))
def test_a_tool_loop_of_a_model_that_thinks_computes_nothing_twice(thinking: Front, path: str) -> None:
    said = [{"role": "user", "content": f"{path}: {QUESTION}"}]
    first = ask(thinking, path, turns_of(path, said)).json()
    prompt, _, reply = counts(path, first)
    after = ask(thinking, path, turns_of(path, [*said, *loop_of(path, first)]))
    assert after.headers["x-agent-memory"] == "extended"
    # But what a reply of random tokens may end with: a part of a character.
    assert counts(path, after.json())[1] >= prompt + reply - 4


def without_thoughts(path: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The loop of a client that strips them."""
    if path == CHAT:
        message, result = loop_of(path, answer)
        return [{key: value for key, value in message.items() if key != "reasoning_content"}, result]
    if path == RESPONSES:
        text = [item for item in answer["output"] if item["type"] != "reasoning"] or [
            {"role": "assistant", "content": ""}
        ]
        return [*text, loop_of(path, answer)[-1]]
    message, result = loop_of(path, answer)
    return [{**message, "content": [each for each in message["content"] if each["type"] != "thinking"]}, result]


@pytest.mark.parametrize("path", first_and_in_turn([RESPONSES, CHAT, MESSAGES], seconds=2))
def test_stripped_thoughts_cost_what_follows_them_and_leave_one_memory_also_after_a_restart(
    thinking: Front, path: str
) -> None:
    said = [{"role": "user", "content": f"{path}, stripped: {QUESTION}"}]
    first = ask(thinking, path, turns_of(path, said))
    thinking.gateway.kill()
    thinking.gateway.start()
    after = ask(thinking, path, turns_of(path, [*said, *without_thoughts(path, first.json())]))
    assert after.headers["x-agent-id"] == first.headers["x-agent-id"]
    assert after.headers["x-agent-memory"] == "extended"
    assert counts(path, after.json())[1] >= counts(path, first.json())[0] - 1
    place = json.loads(after.headers["x-kvasir-miss"])
    assert (place["message"], place["role"], place["what"]) == (1, "assistant", "thoughts")


@pytest.mark.parametrize(
    ("path", "change"),
    first_and_in_turn(
        [
            (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 6}}),
            (CHAT, {"thinking_budget": 6}),
            (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 6}}),
        ],
        seconds=2,
    ),
)
def test_a_budget_ends_the_thoughts_and_the_answer_comes(thinking: Front, path: str, change: dict[str, Any]) -> None:
    """And a tool loop behind it computes nothing twice."""
    said = [{"role": "user", "content": f"{change}: {QUESTION}"}]
    body = {**turns_of(path, said), "temperature": 0, "logit_bias": None}
    answered = ask(thinking, path, {**body, **change})
    assert "x-kvasir-ignored" not in answered.headers
    first = answered.json()
    if path == CHAT:
        told = first["choices"][0]["message"]
        thoughts, answer = told["reasoning_content"], told["content"]
    else:
        thoughts, answer = first["content"][0]["thinking"], first["content"][1]["text"]
    assert thoughts
    assert answer
    assert json.dumps(thoughts, ensure_ascii=False)[1:-1] in ask(thinking, path, body).text
    prompt, _, reply = counts(path, first)
    after = ask(thinking, path, turns_of(path, [*said, *loop_of(path, first)])).json()
    assert counts(path, after)[1] >= prompt + reply - 4


@pytest.mark.long(3)
@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT, {"enable_thinking": False}),
        (CHAT, {"reasoning_effort": "none"}),
        (CHAT, {"chat_template_kwargs": {"thinking": False}}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}}),
        ("/api/chat", {"think": False, "stream": False, "options": {"num_predict": 40}}),
    ],
)
def test_thinking_is_switched_off_in_every_apis_words(thinking: Front, path: str, change: dict[str, Any]) -> None:
    said = [{"role": "user", "content": QUESTION}]
    body = {"messages": said} if path == "/api/chat" else turns_of(path, said)
    answered = ask(thinking, path, {**body, **change})
    assert "x-kvasir-ignored" not in answered.headers
    assert "reasoning" not in answered.text.replace('"reasoning_tokens"', "")
    assert '"thinking"' not in answered.text.replace('"model":"thinking"', "")


def test_a_count_is_that_of_the_prompt_with_its_settings(thinking: Front) -> None:
    said = [{"role": "user", "content": QUESTION}]
    path = "/v1/messages/count_tokens"
    counted = [
        ask(thinking, path, {"messages": said, "thinking": {"type": kind}}).json()["input_tokens"]
        for kind in ("adaptive", "disabled")
    ]
    prompts = [
        counts(MESSAGES, ask(thinking, MESSAGES, {**turns_of(MESSAGES, said), "thinking": {"type": kind}}).json())[0]
        for kind in ("adaptive", "disabled")
    ]
    assert counted == prompts


def test_after_a_restart_of_the_gateway_thoughts_are_still_ours(thinking: Front) -> None:
    said = [{"role": "user", "content": f"Once more. {QUESTION}"}]
    first = ask(thinking, MESSAGES, turns_of(MESSAGES, said)).json()
    prompt, _, reply = counts(MESSAGES, first)
    thinking.gateway.kill()
    thinking.gateway.start()
    after = ask(thinking, MESSAGES, turns_of(MESSAGES, [*said, *loop_of(MESSAGES, first)]))
    assert "x-kvasir-ignored" not in after.headers
    assert counts(MESSAGES, after.json())[1] >= prompt + reply - 4


def test_sealed_thoughts_of_one_namespace_are_opened_in_no_other(thinking: Front) -> None:
    said = [{"role": "user", "content": f"Secretly. {QUESTION}"}]
    first = ask(thinking, RESPONSES, turns_of(RESPONSES, said)).json()
    again = turns_of(RESPONSES, [*said, *loop_of(RESPONSES, first)])
    ignored = [
        ask(thinking, RESPONSES, again, caller).headers.get("x-kvasir-ignored") for caller in ("ada", "bob", "eve")
    ]
    assert ignored == [None, None, "input[1].encrypted_content"]
