"""Ollama's API over HTTP, as its clients send it: lines of JSON, options, names with a tag, calls without ids."""

import json
from typing import Any

import httpx2 as httpx
import pytest
from kvasir.clients import Choice, Reply
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir_gateway.ollama import turns
from kvasir_gateway.reading.tolerance import Reading
from kvasir_gateway.turn import Asked, Said, sse

from tests.gateway.conftest import ENCODER, Front
from tests.gateway.page.html_page import HTML
from tests.gateway.serving import MODEL
from tests.made_models.messages import user

CHAT, GENERATE = "/api/chat", "/api/generate"
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
COLOUR["additionalProperties"] = False
ASKED = Asked(request_id="r", created=0, model=MODEL)


def ask(front: Front, path: str, **asked: Any) -> httpx.Response:
    headers = {**front.bearer(), **asked.pop("headers", {})}
    asked = {"model": f"{MODEL}:latest", "stream": False, **asked}
    body = {name: value for name, value in asked.items() if value is not None}
    return httpx.post(front.gateway.url + path, json=body, headers=headers, timeout=60)


def told(front: Front, path: str, **asked: Any) -> dict[str, Any]:
    answer = ask(front, path, **asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_chat_is_remembered_and_goes_on_in_another_api(front: Front) -> None:
    messages = [user("My name is Anna. I speak to a llama.")]
    for question, done in (("My dog is called Rex.", "new"), ("What is my name?", "extended")):
        answer = ask(front, CHAT, messages=messages)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-agent-memory"] == done
        assert answer.headers["x-agent-id"].startswith("conversation/")
        messages += [answer.json()["message"], user(question)]
    asked = {"model": MODEL, "messages": messages}
    gone_on = httpx.post(f"{front.gateway.url}/v1/chat/completions", json=asked, headers=front.bearer(), timeout=60)
    assert "Anna" in gone_on.json()["choices"][0]["message"]["content"]
    assert gone_on.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 30
    assert gone_on.headers["x-agent-id"] == answer.headers["x-agent-id"]


def test_a_stream_is_lines_that_say_what_the_whole_says_and_how_long_it_took(front: Front) -> None:
    asked: dict[str, Any] = {"messages": [user("My name is Anna. What is my name?")]}
    whole = told(front, CHAT, **asked)
    streamed = ask(front, CHAT, stream=None, **asked)
    assert streamed.headers["content-type"] == "application/x-ndjson"
    *lines, last = [json.loads(line) for line in streamed.text.splitlines()]
    assert len(lines) > 1
    assert not any(line["done"] for line in lines)
    assert "".join(line["message"]["content"] for line in lines) == whole["message"]["content"]
    assert (last["done"], last["done_reason"], last["model"]) == (True, "stop", MODEL)
    counted = {"model": MODEL, **asked}
    count = httpx.post(
        f"{front.gateway.url}/v1/messages/count_tokens", json=counted, headers=front.bearer(), timeout=60
    )
    assert last["prompt_eval_count"] == whole["prompt_eval_count"] == count.json()["input_tokens"]
    assert last["eval_count"] == whole["eval_count"] > 2
    names = ("load", "prompt_eval", "eval")
    parts = [last[f"{name}_duration"] for name in names]
    assert all(isinstance(part, int) for part in parts)
    assert last["total_duration"] >= sum(parts)
    assert last["eval_duration"] > 0


@pytest.mark.long(2)
def test_an_event_is_one_line_also_for_clients_that_end_lines_where_unicode_does(front: Front) -> None:
    """As httpx does, with which Ollama's own client reads."""
    text = "a\u2028b\u2029c\x85d"
    streamed = ask(front, GENERATE, stream=None, prompt="Repeat it.", format={"enum": [text]})
    lines = [json.loads(line)["response"] for line in streamed.text.splitlines()]
    assert json.loads("".join(lines)) == text
    _, data, end = sse({"text": text}, "delta").splitlines()
    assert (json.loads(data.removeprefix("data: ")), end) == ({"text": text}, "")


def test_options_and_formats_are_applied(front: Front) -> None:
    red = [user("My favourite colour is red.")]
    assert told(front, CHAT, messages=red, format=COLOUR)["message"]["content"] == '{"colour": "red"}'
    begun = told(front, GENERATE, prompt="A thing.", format="json", options={"num_predict": 4})["response"]
    assert begun.startswith("{")
    short = told(front, GENERATE, prompt="Tell me a story.", options={"num_predict": 2})
    assert (short["done_reason"], short["eval_count"]) == ("length", 2)
    drawn: dict[str, Any] = {"temperature": 2, "top_k": 40, "top_p": 0.99, "min_p": 0.0, "presence_penalty": 0.5}
    drawn["num_predict"] = 16
    ones, same, others = (
        told(front, GENERATE, prompt="Once", raw=True, options={**drawn, "seed": seed})["response"]
        for seed in (7, 7, 8)
    )
    assert ones == same != others
    stopped = told(front, CHAT, messages=[user("My name is Anna. What is my name?")], options={"stop": ["Anna"]})
    assert "Anna" not in stopped["message"]["content"]
    spelled = told(front, CHAT, messages=red, logprobs=True, top_logprobs=2)
    assert "".join(each["token"] for each in spelled["logprobs"]).startswith(spelled["message"]["content"])


def test_generate_asks_with_the_template_and_raw_without(front: Front) -> None:
    prompt = "My name is Anna. What is my name?"
    asked = told(front, GENERATE, prompt=prompt, system="Be brief.")
    chat = told(front, CHAT, messages=[{"role": "system", "content": "Be brief."}, user(prompt)])
    assert asked["response"] == chat["message"]["content"]
    assert asked["prompt_eval_count"] == chat["prompt_eval_count"]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    text = httpx.post(f"{front.gateway.url}/v1/completions", json=body, headers=front.bearer(), timeout=60).json()
    raw = told(front, GENERATE, prompt=prompt, raw=True, options={"num_predict": 8})
    assert raw["response"] == text["choices"][0]["text"]
    assert raw["prompt_eval_count"] == text["usage"]["prompt_tokens"] < asked["prompt_eval_count"]


def test_calls_and_results_that_come_back_without_ids_belong_together(front: Front) -> None:
    messages: list[Any] = [user("What is the weather in Paris?")]
    first = ask(front, CHAT, messages=messages, tools=[WEATHER])
    [call] = first.json()["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"place": "Paris"}}
    del call["id"]
    result = {"role": "tool", "tool_name": "weather", "content": "sunny"}
    messages += [{**first.json()["message"], "tool_calls": [call]}, result]
    second = ask(front, CHAT, messages=messages, tools=[WEATHER])
    assert second.json()["message"]["content"]
    assert second.headers["x-agent-memory"] == "extended"
    assert second.headers["x-agent-id"] == first.headers["x-agent-id"]


def test_ids_are_given_in_order_and_kept_where_they_came() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in "ab"]
    talk: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_name": "a"},
        {"role": "tool", "content": "2", "tool_name": "b"},
        {"role": "assistant", "tool_calls": [{"id": "mine", **calls[0]}]},
        {"role": "tool", "content": "3", "tool_call_id": "mine"},
    ]
    asked = turns.OllamaChat.model_validate({"model": MODEL, "messages": [*talk, user("?")]}).turn(Reading())
    assert asked is not None
    assert [call.id for message in asked.messages for call in message.tool_calls] == ["call00000", "call00001", "mine"]
    assert [m.tool_call_id for m in asked.messages if m.role == "tool"] == ["call00000", "call00001", "mine"]
    assert asked.messages[1] == Said("tool", "1", "a", (), "call00000")


@pytest.mark.parametrize("shows", [True, False])
def test_what_the_model_thought_is_apart_from_what_it_said(*, shows: bool) -> None:
    finished = pb.Finished(reason=pb.FINISH_REASON_STOP)
    reply = Reply(choices=[Choice("Yes.", "Hm.", finished=finished)])
    thinking = {"thinking": "Hm."} if shows else {}
    whole = turns.whole(ASKED, reply, is_chat=True, shows_thinking=shows)
    assert whole["message"] == {"role": "assistant", "content": "Yes.", **thinking}
    lines = turns.OllamaLines(ASKED, is_chat=False, shows_thinking=shows)
    events = [
        pb.GenerateResponse(started=pb.Started(model="m")),
        pb.GenerateResponse(delta=pb.Delta(reasoning_text="Hm.")),
        pb.GenerateResponse(delta=pb.Delta(text="Yes.")),
        pb.GenerateResponse(finished=finished),
    ]
    streamed = [json.loads(line) for event in events for line in lines.frames(event).splitlines()]
    assert "".join(line.get("thinking", "") for line in streamed) == thinking.get("thinking", "")
    assert "".join(line["response"] for line in streamed) == "Yes."


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (CHAT, {"messages": [{**user("?"), "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"messages": [{"role": "wizard", "content": "?"}]}, "messages[0].role"),
        (CHAT, {"messages": [user("?"), {"role": "assistant", "content": ""}]}, "messages"),
        (CHAT, {"messages": [user("?")], "format": "yaml"}, "format"),
        (CHAT, {"messages": [user("?")], "top_logprobs": 2}, "top_logprobs"),
        (GENERATE, {"prompt": "?", "images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "?", "suffix": "."}, "suffix"),
        (GENERATE, {"prompt": "?", "template": "{{ .Prompt }}"}, "template"),
        (GENERATE, {"prompt": "?", "context": [1, 2]}, "context"),
        (GENERATE, {"prompt": "?", "raw": True, "system": "Be brief."}, "system"),
        (GENERATE, {"prompt": "?", "options": {"mirostat": 2}}, "options.mirostat"),
        (GENERATE, {"prompt": "?", "options": {"presence_penalty": 2.5}}, "options.presence_penalty"),
        (GENERATE, {"prompt": "?", "options": {"typical_p": 0.7}}, "options.typical_p"),
        (GENERATE, {"prompt": "?", "options": {"num_predict": 0}}, "options.num_predict"),
        (GENERATE, {"prompt": "?", "options": {"top_k": -1}}, "options.top_k"),
        ("/api/show", {}, "model"),
    ],
)
def test_a_refusal_names_the_field_in_ollamas_shape(
    front: Front, path: str, change: dict[str, Any], field: str
) -> None:
    answer = ask(front, path, **({"model": None} if path == "/api/show" else {}), **change)
    assert answer.status_code == 400, answer.text
    assert set(answer.json()) == {"error"}
    assert answer.json()["error"].startswith(f"{field}: ")


def test_what_changes_no_meaning_is_ignored_and_reported(front: Front, strict: Front) -> None:
    asked: dict[str, Any] = {"messages": [user("Hello.")], "keep_alive": "5m", "think": True}
    asked["options"] = {"num_ctx": 4096, "num_gpu": 1, "num_predict": -1, "repeat_penalty": 1.1, "repeat_last_n": -1}
    answer = ask(front, CHAT, **asked)
    assert answer.headers["x-kvasir-ignored"] == "keep_alive, options.num_ctx, options.num_gpu, think"
    assert ask(strict, CHAT, **asked).status_code == 400


def test_models_are_listed_shown_and_found_with_a_tag(front: Front, strict: Front) -> None:
    url, headers = strict.gateway.url, strict.bearer()
    [listed, beside] = httpx.get(f"{url}/api/tags", headers=headers).json()["models"]
    [running, embedder] = httpx.get(f"{url}/api/ps", headers=headers).json()["models"]
    assert beside["name"] == embedder["name"] == ENCODER
    assert told(strict, "/api/show", model=ENCODER, stream=None)["capabilities"] == ["embedding"]
    assert listed["name"] == running["model"] == MODEL
    assert len(listed["digest"]) == 64
    shown = told(strict, "/api/show", stream=None)
    assert shown["model_info"]["kvasir.context_length"] == running["context_length"] > 0
    assert shown["capabilities"] == ["completion", "tools"]
    assert httpx.get(f"{url}/api/version", headers=headers).json()["version"].count(".") == 2
    for path, empty in ((CHAT, {"messages": []}), (GENERATE, {"prompt": ""})):
        assert told(front, path, **empty)["done_reason"] == "load"
        assert told(front, path, model="llama3.2", **empty)["model"] == MODEL
        missing = ask(strict, path, model="llama3.2", **empty)
        assert (missing.status_code, set(missing.json())) == (404, {"error"})
    assert ask(strict, CHAT, model="llama3.2", messages=[user("?")]).status_code == 404


def test_strangers_and_other_paths_are_refused_in_ollamas_shape(front: Front) -> None:
    for path, headers, status in (
        (CHAT, {"authorization": "Bearer wrong"}, 401),
        (CHAT, {"host": "kvasir.attacker.example"}, 403),
        ("/api/pull", front.bearer(), 404),
    ):
        answer = httpx.post(front.gateway.url + path, json={"model": MODEL}, headers=headers)
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
    for body in (b"", b"{", b"[]", b'{"model": "m", "messages": "\\ud800", "prompt": 7}', b'{"model": 7}'):
        for path in (CHAT, GENERATE):
            answer = httpx.post(front.gateway.url + path, content=body, headers=front.bearer())
            assert (answer.status_code, set(answer.json())) == (400, {"error"})


def test_the_root_says_ollamas_words_to_programs_and_shows_people_the_page(front: Front) -> None:
    for accept in ("*/*", "application/json"):
        answer = httpx.get(front.gateway.url, headers={"accept": accept})
        assert (answer.status_code, answer.text) == (200, "Ollama is running")
    assert httpx.head(front.gateway.url).status_code == 200
    page = httpx.get(front.gateway.url, headers=HTML)
    assert page.status_code == 401
    assert "<form" in page.text
