"""Embeddings over HTTP, as OpenAI's and Ollama's clients ask for them."""

import base64
import struct
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from tests.gateway.conftest import ENCODER, Front
from tests.gateway.serving import MODEL
from tests.made_models.tiny_encoder import MOST_TOKENS, WIDTH

TEXTS = ["the dog sleeps", "Rex runs", "the cat"]
OPENAI, EMBED, OLDER = "/v1/embeddings", "/api/embed", "/api/embeddings"


def ask(front: Front, path: str, **asked: Any) -> httpx.Response:
    body = {"model": ENCODER, **asked}
    return httpx.post(front.gateway.url + path, json=body, headers=front.bearer(), timeout=60)


def told(front: Front, path: str, **asked: Any) -> dict[str, Any]:
    answer = ask(front, path, **asked)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    return [each["embedding"] for each in answer["data"]]


@pytest.mark.parametrize("model", [ENCODER, MODEL])
def test_openais_client_gets_what_the_engine_computes(front: Front, model: str) -> None:
    with front.house.client(front.keys["ada"]) as engine:
        wanted = engine.embed(TEXTS, model=model)
    client = front.openai(is_strict=False)  # its types are of lists, and it asks for base64
    found = client.embeddings.create(model=model, input=TEXTS)
    assert found.model == model
    assert [each.embedding for each in found.data] == [list(each.values) for each in wanted.embeddings]
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(each.tokens for each in wanted.embeddings)
    plain = told(front, OPENAI, model=model, input=TEXTS[0], encoding_format="float")
    assert vectors(plain) == [found.data[0].embedding]
    packed = vectors(told(front, OPENAI, model=model, input=TEXTS[0], encoding_format="base64"))[0]
    data = base64.b64decode(packed)  # type: ignore[arg-type]  # a text here
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == found.data[0].embedding


def test_tokens_and_fewer_dimensions(front: Front) -> None:
    whole = vectors(told(front, OPENAI, input="the dog sleeps"))
    assert vectors(told(front, OPENAI, input=[2, 4, 5, 7, 3])) == whole
    assert vectors(told(front, OPENAI, input=[[2, 4, 5, 7, 3], [2, 9, 8, 3]]))[:1] == whole
    [short] = vectors(told(front, OPENAI, input="the dog sleeps", dimensions=4))
    assert np.allclose(short, np.array(whole[0][:4]) / np.linalg.norm(whole[0][:4]), atol=1e-6)


def test_a_name_that_is_no_models_is_the_embedding_models_and_the_answer_reports_it(
    front: Front, strict: Front
) -> None:
    for path in (OPENAI, EMBED):
        assert told(front, path, model="text-embedding-3-small", input="Rex")["model"] == ENCODER
        assert ask(strict, path, model="text-embedding-3-small", input="Rex").status_code == 404
    listed = httpx.get(f"{front.gateway.url}/v1/models", headers=front.bearer()).json()["data"]
    assert [model["id"] for model in listed] == [MODEL, ENCODER]


def test_many_texts_keep_their_order_and_a_bad_one_its_number(front: Front) -> None:
    texts = [TEXTS[number % 3] for number in range(130)]
    found = vectors(told(front, OPENAI, input=texts))
    assert found == (vectors(told(front, OPENAI, input=TEXTS)) * 44)[:130]
    refused = ask(front, OPENAI, input=[*texts, "the dog " * MOST_TOKENS])
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert refused.json()["error"]["message"].startswith("input[130]: ")


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (OPENAI, {"input": []}, "input"),
        (OPENAI, {"input": ""}, "input"),
        (OPENAI, {"input": ["x", ""]}, "input[1]"),
        (OPENAI, {"input": [1 << 31]}, "input"),
        (OPENAI, {"input": "x", "dimensions": WIDTH + 1}, "dimensions"),
        (OPENAI, {"input": "x", "dimensions": 0}, "dimensions"),
        (OPENAI, {"input": "x", "encoding_format": "int8"}, "encoding_format"),
        (EMBED, {"input": ["x", ""]}, "input[1]"),
        (EMBED, {"input": "the dog " * MOST_TOKENS, "truncate": False}, "input"),
        (OLDER, {"prompt": ""}, "prompt"),
    ],
)
def test_a_refusal_names_the_field(front: Front, path: str, change: dict[str, Any], field: str) -> None:
    answer = ask(front, path, **change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error if path != OPENAI else error["message"]).startswith(f"{field}: ")


def test_ollamas_clients_get_whole_texts_or_cut_ones(front: Front) -> None:
    wanted = vectors(told(front, OPENAI, input=TEXTS))
    found = ask(front, EMBED, model=f"{ENCODER}:latest", input=TEXTS, keep_alive="5m", options={"num_ctx": 512})
    assert found.headers["x-kvasir-ignored"] == "keep_alive, options"
    assert found.json()["embeddings"] == wanted
    assert found.json()["prompt_eval_count"] == 13
    assert found.json()["total_duration"] > 0
    assert told(front, EMBED, input=[])["embeddings"] == []
    assert told(front, OLDER, prompt=TEXTS[1]) == {"embedding": wanted[1]}
    cut = told(front, EMBED, input="the dog " * MOST_TOKENS)
    assert cut["prompt_eval_count"] == MOST_TOKENS
    assert len(told(front, EMBED, input="Rex", dimensions=3)["embeddings"][0]) == 3


def test_a_chat_with_the_embedding_models_name_is_the_loaded_models(front: Front, strict: Front) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    assert told(front, "/v1/chat/completions", **asked)["model"] == MODEL
    assert ask(strict, "/v1/chat/completions", **asked).status_code == 404
    assert httpx.get(f"{front.gateway.url}/healthz").json()["status"] == "ok"
