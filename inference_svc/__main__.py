"""The composition root of the inference service: `python -m inference_svc serve --listen unix:/path …`."""

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator

import structlog
from kvasir.aio_store_client import AioStoreClient
from kvasir.credentials import DEFAULT_NAMESPACE, CredentialFileError, read_token
from kvasir.errors import KvasirError
from kvasir.inference.v1 import inference_pb2_grpc
from kvasir.serving import EdgeServer, RefusedToStart, run

from inference_svc.admission import Admission, AdmissionLimits
from inference_svc.config import ConfigError, EngineSettings, read_settings
from inference_svc.copies import Copies
from inference_svc.engine import Engine
from inference_svc.grammar_trial import GrammarTrial
from inference_svc.models import kvasir_tiny
from inference_svc.prompting import Prompting
from inference_svc.publishing import Publisher, PublishingLimits
from inference_svc.recall import Recall
from inference_svc.remote_cache import RemoteCache
from inference_svc.reply_formats import ReplyFormats
from inference_svc.service import ALLOWED_ROLES, SERVICE_NAME, InferenceService, new_request_id
from inference_svc.service_stats import ServiceStats
from inference_svc.turn_ending import TurnEnding
from inference_svc.turn_flow import TurnLimits, TurnService

_LOG = structlog.get_logger("inference_svc")
_EX_CONFIG = 78


def main() -> int:
    try:
        settings = read_settings(sys.argv[1:])
        _set_up_logging(settings)
        run(serve(settings))
    except (ConfigError, RefusedToStart, CredentialFileError) as error:
        print(f"inference_svc: {error}", file=sys.stderr)
        return _EX_CONFIG
    except KvasirError as error:
        print(f"inference_svc: {error.message}", file=sys.stderr)
        return 1
    return 0


async def serve(settings: EngineSettings) -> None:
    """Load, be ready, serve until told to stop, let turns and publications end, and go."""
    server = EdgeServer(
        settings.listening,
        [SERVICE_NAME],
        ALLOWED_ROLES,
        new_request_id=new_request_id,
        # A prompt a little over the limit gets our words instead of gRPC's.
        max_message_bytes=2 * settings.max_prompt_bytes + (1 << 20),
    )
    stores = _stores(settings)
    async with contextlib.AsyncExitStack() as stack:
        for store in stores.values():
            stack.push_async_callback(store.close)
        # Loading takes seconds: off the loop, so that health can say "not yet".
        engine = await asyncio.to_thread(_open_engine, settings)
        stack.push_async_callback(asyncio.to_thread, engine.close)
        prompting = Prompting(engine.tokenizer, engine.token_text)
        stack.callback(prompting.close)
        formats = ReplyFormats(GrammarTrial())
        stack.callback(formats.close)
        turns = _turns(settings, engine, prompting, stores)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(  # type: ignore[no-untyped-call]
            InferenceService(
                engine,
                turns,
                stores,
                formats,
                max_prompt_bytes=settings.max_prompt_bytes,
                memory_budget_bytes=settings.memory_budget_bytes,
                is_stopping=server.stopping.is_set,
            ),
            server.grpc,
        )
        # Connected before the first turn, whose budget for the store is better spent on reading.
        await asyncio.gather(*(store.answers() for store in stores.values()))
        async with _listening(server):
            model = engine.model
            _LOG.info(
                "engine.ready",
                address=server.address,
                model=model.name,
                device=engine.device,
                blas=engine.blas,
                kv_policy=model.policy_name,
                kv_policy_layers=f"{model.policy_applied_layers} of {model.layer_count}",
            )
            await server.run_until_stopped(settings.stop_grace_s)
            await turns.drain(settings.stop_grace_s)
    _LOG.info("engine.stopped")


@contextlib.asynccontextmanager
async def _listening(server: EdgeServer) -> AsyncIterator[None]:
    await server.start()
    await server.set_ready(True)
    yield


def _open_engine(settings: EngineSettings) -> Engine:
    return Engine.open(
        settings.model or kvasir_tiny.path(),
        cache_dir=settings.state_dir,
        memory_budget_bytes=settings.memory_budget_bytes,
        policy=settings.policy_request,
        context_tokens=settings.context_tokens,
        compute_type=settings.compute_type,
        max_open_turns=settings.max_turns,
    )


def _stores(settings: EngineSettings) -> dict[str, RemoteCache]:
    """The cache store by namespace: each token is bound to one, and no token is the owner's on its Unix socket."""
    if not settings.store:
        return {}
    tokens: dict[str, str | None] = {
        namespace: read_token(path) for namespace, path in settings.store_token_file.items()
    }
    if settings.store.startswith("unix:"):
        tokens.setdefault(DEFAULT_NAMESPACE, None)
    return {
        namespace: RemoteCache(
            AioStoreClient.connect(settings.store, token=token, tls=settings.store_tls, retry_reads=False)
        )
        for namespace, token in tokens.items()
    }


def _turns(
    settings: EngineSettings, engine: Engine, prompting: Prompting, stores: dict[str, RemoteCache]
) -> TurnService:
    stats = ServiceStats(time.monotonic())
    limits = AdmissionLimits(max_turns=settings.max_turns)
    publishing = PublishingLimits(commit_wait_s=settings.commit_wait_s, timeout_s=settings.publish_timeout_s)
    admission = Admission(limits, stats, time.monotonic)
    copies = Copies(engine, admission.publishing, time.monotonic)
    publisher = Publisher(engine, copies, publishing, stats, time.monotonic, lambda: time.time_ns() // 1_000_000)
    return TurnService(
        engine,
        prompting,
        Recall(engine, prompting, stores, worthwhile_fraction=settings.worthwhile_fraction),
        TurnEnding(engine, prompting, publisher, stores, time.monotonic),
        stores,
        TurnLimits(
            store_budget_s=settings.store_budget_ms / 1000,
            publish_timeout_s=settings.publish_timeout_s,
        ),
        admission,
        stats,
        time.monotonic,
    )


def _set_up_logging(settings: EngineSettings) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    renderer = (
        structlog.processors.JSONRenderer()
        if settings.log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


if __name__ == "__main__":
    sys.exit(main())
