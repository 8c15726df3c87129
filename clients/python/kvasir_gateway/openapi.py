"""The OpenAPI document: one row per operation, and the schemas of the bodies that the gateway reads."""

from dataclasses import dataclass
from typing import Any

from kvasir.names import MAX_NAME_BYTES, MAX_REQUEST_ID_CHARS
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvasir_gateway.agents import AgentTurn, ForkRequest, RollbackRequest
from kvasir_gateway.anthropic_messages import CountedMessages, MessagesRequest
from kvasir_gateway.embedding.bodies import EmbeddingsRequest, OllamaEmbed, OllamaEmbeddings
from kvasir_gateway.errors import api_of
from kvasir_gateway.ollama.models import ShowRequest
from kvasir_gateway.ollama.turns import OllamaChat, OllamaGenerate
from kvasir_gateway.openai.chat import ChatRequest
from kvasir_gateway.openai.completions import CompletionRequest
from kvasir_gateway.openai.responses import ResponsesRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of the document. `answers`: fields that every answer has. `method`: left out, post with a body."""

    path: str
    summary: str
    answers: tuple[str, ...]
    body: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    status: int = 200
    streams: bool = False
    is_open: bool = False
    method: str = ""


_COMPLETION = ("id", "object", "created", "model", "choices")
_TURN = ("started", "text", "finished")
_PAGE = ("page_size", "page_token")
_LINE = ("model", "created_at", "done")
OPERATIONS = (
    Operation("/v1/chat/completions", "OpenAI's chat completions", _COMPLETION, ChatRequest, streams=True),
    Operation("/v1/completions", "OpenAI's completions", _COMPLETION, CompletionRequest, streams=True),
    Operation("/v1/responses", "OpenAI's responses", ("id", "output"), ResponsesRequest, streams=True),
    Operation("/v1/embeddings", "OpenAI's embeddings", ("data", "model", "usage"), EmbeddingsRequest),
    Operation("/v1/models", "The engine's models", ("data",)),
    Operation("/v1/models/{model}", "One model", ("id",)),
    Operation("/v1/messages", "Anthropic's messages", ("id", "content", "usage"), MessagesRequest, streams=True),
    Operation("/v1/messages/count_tokens", "Anthropic's counting of tokens", ("input_tokens",), CountedMessages),
    Operation(
        "/v1/agents/{agent_id}/generate",
        "A turn of an agent, in the contract's own terms",
        _TURN,
        AgentTurn,
        streams=True,
    ),
    Operation(
        "/v1/agents/{agent_id}/fork", "A new agent with this one's memory", ("agent_id",), ForkRequest, status=201
    ),
    Operation("/v1/agents/{agent_id}/rollback", "Make an old version the newest again", ("version",), RollbackRequest),
    Operation("/v1/agents/{agent_id}/versions", "An agent's versions, newest first", (), query=_PAGE),
    Operation("/v1/agents", "Agents by name", (), query=("name_prefix", *_PAGE)),
    Operation("/v1/agents/{agent_id}", "One agent", ("agent_id",)),
    Operation("/v1/agents/{agent_id}", "Forget an agent", (), query=("force",), method="delete"),
    Operation("/api/chat", "Ollama's chat", _LINE, OllamaChat, streams=True),
    Operation("/api/generate", "Ollama's generate", _LINE, OllamaGenerate, streams=True),
    Operation("/api/embed", "Ollama's embeddings", ("embeddings",), OllamaEmbed),
    Operation("/api/embeddings", "One embedding of Ollama's", ("embedding",), OllamaEmbeddings),
    Operation("/api/show", "One model, as Ollama shows it", ("details",), ShowRequest),
    Operation("/api/tags", "The engine's models, as Ollama lists them", ("models",)),
    Operation("/api/ps", "Those that are loaded", ("models",)),
    Operation("/api/version", "The version of Ollama's API that this is", ("version",)),
    Operation("/healthz", "Whether engine and store are well: 503 when not", ("status",), is_open=True),
)
_QUERY: dict[str, Json] = {
    "page_size": {"type": "integer", "minimum": 0, "maximum": 1000},
    "force": {"type": "boolean"},
}


def _error(error: Json, *required: str) -> Json:
    return {"type": "object", "required": [*required, "error"], "properties": {"error": error}}


def _with(*names: str) -> Json:
    return {"type": "object", "required": list(names)}


# The body of the answer when something is wrong.
_ERRORS = {
    "OpenAiError": _error(_with("message", "type", "param", "code")),
    "AnthropicError": _error(_with("type", "message"), "type"),
    "OllamaError": _error({"type": "string"}),
    "KvasirError": _error(_with("code", "message")),
}


def document(version: str) -> Json:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        method = operation.method or ("post" if operation.body else "get")
        paths.setdefault(operation.path, {})[method] = _operation(operation, method)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir's gateway",
            "version": version,
            "description": "x-agent-id names the agent whose memory a turn reads and extends. Without it, a "
            "conversation is found again by its messages. The answer's x-agent-memory says what the turn did to it, "
            "x-kvasir-ignored which of the request's fields were ignored, x-kvasir-side-call why it leaves no "
            "memory, x-kvasir-volatile which rules changed its prompt, x-kvasir-reused how much of it was not "
            "computed, x-kvasir-miss why not more, and x-kvasir-not-stored why the store did not take the turn.",
        },
        "security": [{"bearer": []}, {"key": []}],
        "paths": paths,
        "components": {
            "schemas": {**schemas.get("$defs", {}), **_ERRORS},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(operation: Operation, method: str) -> Json:
    api = api_of(operation.path)
    content = _json(_with(*operation.answers))
    if operation.streams:
        content[api.stream_type.partition(";")[0]] = {"schema": {"type": "string"}}
    error = {"description": "A refusal", "content": _json(_ref(api.error))}
    told: Json = {
        "summary": operation.summary,
        "operationId": f"{method}{operation.path}".translate(str.maketrans("/{}", "___")),
        "parameters": _parameters(operation),
        "responses": {str(operation.status): {"description": "Done", "content": content}, "default": error},
    }
    if operation.is_open:
        told["security"] = []
        told["responses"]["503"] = {"description": "Not well", "content": content}
    if operation.body is not None:
        told["requestBody"] = {"required": True, "content": _json(_ref(operation.body.__name__))}
    return told


def _parameters(operation: Operation) -> list[Json]:
    name = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_BYTES}
    found = [
        {"name": part[1:-1], "in": "path", "required": True, "schema": name}
        for part in operation.path.split("/")
        if part.startswith("{")
    ]
    found += [{"name": each, "in": "query", "schema": _QUERY.get(each, {"type": "string"})} for each in operation.query]
    if operation.streams and "{agent_id}" not in operation.path:
        found.append({"name": "x-agent-id", "in": "header", "schema": name})
        asked = {"type": "string", "enum": ["replace", "read-only", "none", "append"]}
        found.append({"name": "x-agent-memory", "in": "header", "schema": asked})
    if operation.streams:
        turn = {"type": "string", "minLength": 1, "maxLength": MAX_REQUEST_ID_CHARS}
        found.append({"name": "x-request-id", "in": "header", "schema": turn})
        found.append({"name": "x-kvasir-volatile", "in": "header", "schema": {"type": "string"}})
    return found


def _json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
