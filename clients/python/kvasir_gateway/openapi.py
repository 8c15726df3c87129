"""The OpenAPI document: one row per operation, and the schemas of the bodies that the gateway reads."""

from dataclasses import dataclass
from typing import Any

from kvasir.names import MAX_NAME_BYTES
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
    """One row of the document."""

    method: str
    path: str
    summary: str
    # Fields that every answer has.
    answers: tuple[str, ...]
    body: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    status: int = 200
    streams: bool = False
    # As the body of the answer when something is wrong.
    error: str = "OpenAiError"
    is_open: bool = False


_COMPLETION = ("id", "object", "created", "model", "choices")
_LINE = ("model", "created_at", "done")
OPERATIONS = (
    Operation("post", "/v1/chat/completions", "OpenAI's chat completions", _COMPLETION, ChatRequest, streams=True),
    Operation("post", "/v1/completions", "OpenAI's completions", _COMPLETION, CompletionRequest, streams=True),
    Operation("post", "/v1/responses", "OpenAI's responses", ("id", "output"), ResponsesRequest, streams=True),
    Operation("post", "/v1/embeddings", "OpenAI's embeddings", ("data", "model", "usage"), EmbeddingsRequest),
    Operation("get", "/v1/models", "The engine's models", ("data",)),
    Operation("get", "/v1/models/{model}", "One model", ("id",)),
    Operation(
        "post",
        "/v1/messages",
        "Anthropic's messages",
        ("id", "content", "usage"),
        MessagesRequest,
        streams=True,
        error="AnthropicError",
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Anthropic's counting of tokens",
        ("input_tokens",),
        CountedMessages,
        error="AnthropicError",
    ),
    Operation(
        "post",
        "/v1/agents/{agent_id}/generate",
        "A turn of an agent, in the contract's own terms",
        ("started", "text", "finished"),
        AgentTurn,
        streams=True,
        error="KvasirError",
    ),
    Operation(
        "post",
        "/v1/agents/{agent_id}/fork",
        "A new agent with this one's memory",
        ("agent_id",),
        ForkRequest,
        (),
        201,
        error="KvasirError",
    ),
    Operation(
        "post",
        "/v1/agents/{agent_id}/rollback",
        "Make an old version the newest again",
        ("version",),
        RollbackRequest,
        error="KvasirError",
    ),
    Operation(
        "get",
        "/v1/agents/{agent_id}/versions",
        "An agent's versions, newest first",
        (),
        query=("page_size", "page_token"),
        error="KvasirError",
    ),
    Operation(
        "get",
        "/v1/agents",
        "Agents by name",
        (),
        query=("name_prefix", "page_size", "page_token"),
        error="KvasirError",
    ),
    Operation("get", "/v1/agents/{agent_id}", "One agent", ("agent_id",), error="KvasirError"),
    Operation("delete", "/v1/agents/{agent_id}", "Forget an agent", (), query=("force",), error="KvasirError"),
    Operation("post", "/api/chat", "Ollama's chat", _LINE, OllamaChat, streams=True, error="OllamaError"),
    Operation("post", "/api/generate", "Ollama's generate", _LINE, OllamaGenerate, streams=True, error="OllamaError"),
    Operation("post", "/api/embed", "Ollama's embeddings", ("embeddings",), OllamaEmbed, error="OllamaError"),
    Operation(
        "post", "/api/embeddings", "One embedding of Ollama's", ("embedding",), OllamaEmbeddings, error="OllamaError"
    ),
    Operation("post", "/api/show", "One model, as Ollama shows it", ("details",), ShowRequest, error="OllamaError"),
    Operation("get", "/api/tags", "The engine's models, as Ollama lists them", ("models",), error="OllamaError"),
    Operation("get", "/api/ps", "Those that are loaded", ("models",), error="OllamaError"),
    Operation("get", "/api/version", "The version of Ollama's API that this is", ("version",), error="OllamaError"),
    Operation("get", "/healthz", "Whether engine and store are well: 503 when not", ("status",), is_open=True),
)
_QUERY: dict[str, Json] = {
    "page_size": {"type": "integer", "minimum": 0, "maximum": 1000},
    "force": {"type": "boolean"},
}
_ERRORS: dict[str, Json] = {
    "OpenAiError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error"],
        "properties": {"error": {"type": "object", "required": ["type", "message"]}},
    },
    "OllamaError": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "KvasirError": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["code", "message"]}},
    },
}


def document(version: str) -> Json:
    """The whole document."""
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, Json] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Kvasir's gateway",
            "version": version,
            "description": "x-agent-id names the agent whose memory a turn reads and extends. Without it, a "
            "conversation is found again by its messages. The answer's x-agent-memory says what the turn did to it, "
            "x-kvasir-ignored which of the request's fields were ignored, x-kvasir-side-call why it leaves no "
            "memory, x-kvasir-volatile which rules changed its prompt, x-kvasir-reused how much of it was not "
            "computed, and x-kvasir-miss why not more.",
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


def _operation(operation: Operation) -> Json:
    answer = {"type": "object", "required": list(operation.answers)}
    content: Json = {"application/json": {"schema": answer}}
    if operation.streams:
        content[api_of(operation.path).stream_type.partition(";")[0]] = {"schema": {"type": "string"}}
    error = {"description": "A refusal", "content": {"application/json": {"schema": _ref(operation.error)}}}
    told: Json = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path}".translate(str.maketrans("/{}", "___")),
        "parameters": _parameters(operation),
        "responses": {str(operation.status): {"description": "Done", "content": content}, "default": error},
    }
    if operation.is_open:
        told["security"] = []
        told["responses"]["503"] = {"description": "Not well", "content": content}
    if operation.body is not None:
        schema = _ref(operation.body.__name__)
        told["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
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
        asked = {"type": "string", "enum": ["replace", "read-only", "none"]}
        found.append({"name": "x-agent-memory", "in": "header", "schema": asked})
    return found


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}
