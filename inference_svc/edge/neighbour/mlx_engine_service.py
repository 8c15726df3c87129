"""`mlx.grpc.engine.MlxEngine`: the same turns under the neighbour's protocol. `TokenLines` finds a prompt's agent."""

import asyncio
import contextlib
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import ref

from kvasir.errors import InvalidArgument, NotFound, Unavailable
from kvasir.names import check_request_id
from kvasir.server.interceptors import current_principal
from smg_grpc_proto import mlx_engine_pb2 as mlx
from smg_grpc_proto import mlx_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from inference_svc.edge.neighbour import mlx_engine_messages as messages
from inference_svc.edge.service import CALLERS, check_serves, new_request_id, new_seed
from inference_svc.edge.telling import send
from inference_svc.engine.engine import Engine, check_fits
from inference_svc.memory.token_lines import TokenLines
from inference_svc.model.model_host import ModelHost
from inference_svc.served_model import ServedModel
from inference_svc.text.literal_text import from_outside
from inference_svc.text.token_ids import TokenIds
from inference_svc.turns.turn_service import Choices

MLX_ENGINE_NAME = mlx.DESCRIPTOR.services_by_name["MlxEngine"].full_name
_RPCS = [method.name for method in mlx.DESCRIPTOR.services_by_name["MlxEngine"].methods]
MLX_ENGINE_ROLES: Mapping[str, frozenset[str]] = {f"/{MLX_ENGINE_NAME}/{rpc}": CALLERS for rpc in _RPCS}
_MAX_ABORTED = 1000
_PIECE_BYTES = 512 << 10


class MlxEngineService(mlx_engine_pb2_grpc.MlxEngineServicer):  # type: ignore[misc]
    def __init__(
        self,
        host: ModelHost[ServedModel],
        lines: TokenLines,
        *,
        max_prompt_bytes: int,
        reader_stall_s: float,
        is_stopping: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        self._host = host
        self._lines = lines
        self._max_prompt_bytes = max_prompt_bytes
        self._reader_stall_s = reader_stall_s
        self._is_stopping = is_stopping
        self._clock = clock
        self._began_s = clock()
        self._archive: tuple[ref[Engine], bytes] | None = None  # a model that is unloaded goes all the same
        self._archiving = asyncio.Lock()

    async def Generate(self, request: mlx.GenerateRequest, context: Any) -> None:
        with messages.fields_by_their_names():
            running = await self._begun(request)  # which keeps no model while a slow reader takes the rest
            writer = messages.ReplyWriter(is_streamed=request.stream)
            try:
                async for _, event in running.events():
                    if (response := writer.response(event)) is not None:
                        await send(context, response, self._reader_stall_s)
            finally:
                running.cancel()  # as in our own Generate: a cancel, a deadline and a disconnect end here

    async def _begun(self, request: mlx.GenerateRequest) -> Choices:
        check_serves(self._is_stopping)
        caller, request_id = current_principal(), request.request_id
        request_id = check_request_id(request_id) if request_id else new_request_id()
        await self._lines.learn(caller.namespace)
        served = await self._host.awake("")
        prompt = await self._prompt(request, served, caller.namespace)
        if self._host.serving("") is not served:  # its tokens would be another text
            raise Unavailable("another model was loaded meanwhile", reason="MODEL_CHANGING", retry_after_s=1.0)
        # No await from here to the turn's begin: no other turn may take its agent.
        busy = {turn.request.agent_id for turn in served.turns.open_turns(caller.namespace)}
        checked = messages.turn_request(
            request,
            prompt,
            agent_id=self._lines.agent_for(served.engine, caller.namespace, prompt, busy),
            request_id=request_id,
            namespace=caller.namespace,
            caller=caller.name,
            new_seed=new_seed,
        )
        return served.turns.begin(checked)

    async def Abort(self, request: mlx.AbortRequest, context: Any) -> mlx.AbortResponse:
        if len(request.request_ids) > _MAX_ABORTED:
            count = len(request.request_ids)
            raise InvalidArgument.of("request_ids", f"expected at most {_MAX_ABORTED}, got {count}")
        if (served := self._host.served) is not None:
            namespace = current_principal().namespace
            await asyncio.gather(*(_stop(served, namespace, each) for each in set(request.request_ids)))
        return mlx.AbortResponse()

    async def HealthCheck(self, request: mlx.HealthCheckRequest, context: Any) -> mlx.HealthCheckResponse:
        problem = "the engine is shutting down" if self._is_stopping() else ""
        can_serve = self._host.served is not None or self._host.sleeps
        problem = problem or ("" if can_serve else "no model is loaded")
        return mlx.HealthCheckResponse(healthy=not problem, message=problem or "OK")

    async def GetModelInfo(self, request: mlx.GetModelInfoRequest, context: Any) -> mlx.GetModelInfoResponse:
        served = await self._host.awake("")
        engine, tokenizer = served.engine, served.engine.tokenizer
        config = json.loads(await asyncio.to_thread((engine.directory / "config.json").read_text))
        return mlx.GetModelInfoResponse(
            model_path=served.name,  # a path of this machine is nobody else's business
            is_generation=True,
            max_context_length=engine.model.context_tokens,
            vocab_size=engine.vocabulary_size,
            served_model_name=served.name,
            model_type=config.get("model_type", ""),
            architectures=config.get("architectures") or (),
            eos_token_ids=engine.model.stop_token_ids,
            pad_token_id=tokenizer.pad_token_id or 0,
            bos_token_id=tokenizer.bos_token_id or 0,
            max_req_input_len=engine.model.context_tokens - 1,  # one is to be generated
        )

    async def GetServerInfo(self, request: mlx.GetServerInfoRequest, context: Any) -> mlx.GetServerInfoResponse:
        served = self._host.served
        turns = served.turns.open_turns(current_principal().namespace) if served is not None else ()
        uptime_s = self._clock() - self._began_s
        return mlx.GetServerInfoResponse(server_type="kvasir", active_requests=len(turns), uptime_seconds=uptime_s)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[Any]:
        data = await self._tokenizer()
        for begin in range(0, len(data), _PIECE_BYTES):
            piece, is_last = data[begin : begin + _PIECE_BYTES], begin + _PIECE_BYTES >= len(data)
            sha256 = hashlib.sha256(data).hexdigest() if is_last else ""
            yield common_pb2.GetTokenizerChunk(data=piece, sha256=sha256)

    async def _tokenizer(self) -> bytes:
        engine = (await self._host.awake("")).engine
        async with self._archiving:  # one at a time, and kept: callers want the same
            if self._archive is None or self._archive[0]() is not engine:
                self._archive = ref(engine), await asyncio.to_thread(tokenizer_archive, engine.directory)
            return self._archive[1]

    async def _prompt(self, request: mlx.GenerateRequest, served: ServedModel, namespace: str) -> TokenIds:
        kind, engine = request.WhichOneof("input"), served.engine
        if kind == "tokenized":
            vocabulary, context = engine.vocabulary_size, engine.model.context_tokens
            return messages.token_ids(request, vocabulary_size=vocabulary, context_tokens=context)
        if not request.text:
            raise InvalidArgument.of("input", "expected tokenized.input_ids or text")
        if (size := len(request.text.encode())) > self._max_prompt_bytes:
            raise InvalidArgument.of(
                "text", f"expected at most {self._max_prompt_bytes} bytes, got {size}", reason="PROMPT_TOO_LARGE"
            )
        prompting, text = served.prompting, from_outside(request.text)
        check_fits(prompting.fewest_tokens(text), 1, engine.model.context_tokens, is_lower_bound=True)
        tokens = (await prompting.run(namespace, lambda: prompting.tokenize(text))).ids
        check_fits(len(tokens), 1, engine.model.context_tokens)
        return tokens


def add_mlx_engine(server: Any, host: ModelHost[ServedModel], lines: TokenLines, **how: Any) -> None:
    mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(MlxEngineService(host, lines, **how), server)


async def _stop(served: ServedModel, namespace: str, request_id: str) -> None:
    with contextlib.suppress(NotFound):  # it has ended by itself
        await served.turns.stop(namespace, request_id)


# No weights, and nothing that runs.
_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)


def tokenizer_archive(directory: Path) -> bytes:
    """The zip archive of the directory's tokenizer files. Takes a second for a large vocabulary."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(directory.iterdir()):
            if (path.name in _NAMES or path.suffix == ".tiktoken") and path.is_file():
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return out.getvalue()
