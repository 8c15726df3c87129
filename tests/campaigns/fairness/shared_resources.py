"""The table of all that callers share in the services and the gateway, as data.

Its test holds it to the code, and SHARED.md shows it.

A row's `site` is where the resource is counted ("file: attribute"), `cap` the name and value of its limit. What each
namespace gets of it is `share`, who comes next `order`, and what a refused caller is told `told`: a reason, or that it
waits. `markdown()` writes the table for people.
"""

from dataclasses import dataclass

# The rule of kvasir.server.fair_shares.
THREE_OF_FREE = "at most 3 times what stays free"
IN_TURN = "namespaces in turn"
WAITS = "waits"


@dataclass(frozen=True)
class Shared:
    """One resource that callers share."""

    resource: str
    service: str  # "store", "engine", "both" of these, or "gateway"
    site: str
    cap: tuple[str, object]  # "module:name", or "" for a number written at the site; and what that is
    share: str
    order: str
    told: str  # reasons, as the status carries them; WAITS; or a sentence


@dataclass(frozen=True)
class Own:
    """A queue or a count of one call, connection or caller: nobody else can fill it."""

    site: str
    why: str


SHARED = (
    Shared(
        "calls that gRPC has not handed over",
        "both",
        "clients/python/kvasir/server/serving.py: MAX_RPCS_AT_ALL",
        ("kvasir.server.serving:MAX_RPCS_AT_ALL", 8192),
        "none: their callers are not known yet",
        "as they came, each address and method by itself",
        "RESOURCE_EXHAUSTED, in gRPC's words",
    ),
    Shared(
        "calls that run",
        "both",
        "clients/python/kvasir/server/interceptors.py: calls",
        ("kvasir.server.interceptors:MAX_CALLS", 1024),
        THREE_OF_FREE,
        "none waits",
        "TOO_MANY_CALLS",
    ),
    Shared(
        "calls of one credential",
        "both",
        "clients/python/kvasir/server/interceptors.py: _running",
        ("kvasir.server.interceptors:MAX_RPCS_PER_PRINCIPAL", 256),
        "each credential has its own",
        "none waits",
        "TOO_MANY_CALLS",
    ),
    Shared(
        "health checks whose message has not come",
        "both",
        "clients/python/kvasir/server/arriving.py: _waiting",
        ("kvasir.server.arriving:MAX_WAITING_CHECKS", 32),
        "for strangers alone; a check whose message came is answered",
        "the oldest makes room for the newest",
        "FIRST_MESSAGE_LATE",
    ),
    Shared(
        "messages of streams that arrive",
        "both",
        "clients/python/kvasir/server/interceptors.py: arriving",
        ("kvasir.server.interceptors:MAX_ARRIVING_BYTES", 256 << 20),
        THREE_OF_FREE,
        IN_TURN,
        "FIRST_MESSAGE_LATE",
    ),
    Shared(
        "messages of streams that arrive, of one credential",
        "both",
        "clients/python/kvasir/server/interceptors.py: arriving_of_caller",
        ("kvasir.server.interceptors:MAX_ARRIVING_BYTES", 256 << 20),
        "a quarter for each credential",
        IN_TURN,
        "FIRST_MESSAGE_LATE",
    ),
    Shared(
        "requests of one message that arrive",
        "both",
        "clients/python/kvasir/server/interceptors.py: arriving_alone",
        ("kvasir.server.interceptors:MAX_ARRIVING_ALONE", 12),
        THREE_OF_FREE,
        IN_TURN,
        "FIRST_MESSAGE_LATE",
    ),
    Shared(
        "requests of one message that arrive, of one credential",
        "both",
        "clients/python/kvasir/server/interceptors.py: arriving_alone_of_caller",
        ("kvasir.server.interceptors:MAX_ARRIVING_ALONE", 12),
        "a quarter for each credential",
        IN_TURN,
        "FIRST_MESSAGE_LATE",
    ),
    Shared(
        "calls that are answered, for 50 ms; streams, for their first 20",
        "both",
        "clients/python/kvasir/server/interceptors.py: answering",
        ("kvasir.server.interceptors:MAX_ANSWERING", 16),
        THREE_OF_FREE,
        IN_TURN,
        WAITS,
    ),
    Shared(
        "connections to the page of numbers (`--metrics-listen`)",
        "both",
        "clients/python/kvasir/server/operating/operator_page.py: _asking",
        ("kvasir.server.operating.operator_page:MOST_READERS", 32),
        "none: nobody shows a key there",
        "of those that have not asked, the oldest makes room for the newest",
        "503",
    ),
    Shared(
        "requests that name more than 500 things",
        "store",
        "cachestore_svc/store/threads.py: long_calls",
        ("cachestore_svc.store.threads:LONG_CALLS", 2),
        "one",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "index thread, reads",
        "store",
        "cachestore_svc/index/sqlite/sqlite_catalog.py: _reads",
        ("cachestore_svc.index.sqlite.sqlite_catalog:MAX_TURN_MS", 10),
        "one operation at a time, of at most 500 blobs",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "index thread, writes and their commit",
        "store",
        "cachestore_svc/index/sqlite/sqlite_catalog.py: _writes",
        ("cachestore_svc.index.sqlite.sqlite_catalog:MAX_WRITES_PER_COMMIT", 256),
        "one operation at a time; a commit ends after 10 ms",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "threads of the store",
        "store",
        "cachestore_svc/store/threads.py: room",
        ("cachestore_svc.store.threads:THREADS", 32),
        THREE_OF_FREE,
        IN_TURN,
        WAITS,
    ),
    Shared(
        "bytes of blobs that wait for readers",
        "store",
        "cachestore_svc/__main__.py: reader",
        ("cachestore_svc.config:StoreSettings.read_buffer_bytes", 128 << 20),
        THREE_OF_FREE,
        IN_TURN + "; a slow reader drops its blob when another reader has none",
        WAITS,
    ),
    Shared(
        "RAM of manifests that are read, answered or listed",
        "store",
        "cachestore_svc/moving/manifest_room.py: room",
        ("cachestore_svc.moving.manifest_room:MANIFEST_ROOM_BYTES", 256 << 20),
        THREE_OF_FREE,
        IN_TURN,
        WAITS,
    ),
    Shared(
        "disk, unfinished writes",
        "store",
        "cachestore_svc/blobs/space.py: _reserved",
        ("cachestore_svc.blobs.space:_SHARE", 4),
        "a quarter of the free disk, or one blob of the largest",
        "none waits",
        "RESERVATIONS_FULL",
    ),
    Shared(
        "disk, what is stored",
        "store",
        "cachestore_svc/blobs/space.py: _stored",
        ("cachestore_svc.config:StoreSettings.free_disk_reserve_bytes", 256 << 20),
        "its quota; without one, all but as much as must stay free, which is for namespaces that hold less",
        "none waits",
        "QUOTA_FULL, DISK_SHARE_FULL, DISK_FULL",
    ),
    Shared(
        "bytes written in a day, if the store refuses beyond its budget",
        "store",
        "cachestore_svc/index/write_budget.py: _written",
        ("cachestore_svc.index.write_budget:_SHARE", 8),
        "all but an eighth, which is for namespaces that wrote less than an eighth",
        "none waits",
        "WRITE_BUDGET_SPENT",
    ),
    Shared(
        "waiting inside of any shared room",
        "both",
        "clients/python/kvasir/server/shared_room.py: _waiting",
        ("kvasir.server.shared_room:_MAX_OVERTAKEN", 16),
        "as the shared room's",
        IN_TURN + "; a large request of a namespace that holds nothing is overtaken 16 times",
        WAITS,
    ),
    Shared(
        "places of turns",
        "engine",
        "inference_svc/turns/admission.py: _turns",
        ("inference_svc.config:EngineSettings.max_turns", 256),
        THREE_OF_FREE + ", and 192; a credential 192",
        "none waits",
        "QUEUE_FULL, NAMESPACE_BUSY, CALLER_BUSY",
    ),
    Shared(
        "bytes of prompts",
        "engine",
        "inference_svc/turns/admission.py: _prompt_bytes",
        ("inference_svc.config:_MAX_OPEN_PROMPT_BYTES", 256 << 20),
        THREE_OF_FREE,
        "none waits",
        "PROMPTS_TOO_LARGE",
    ),
    Shared(
        "KV that open turns may come to need, in KV memories",
        "engine",
        "inference_svc/turns/admission.py: _kv_bytes",
        ("inference_svc.config:_KV_BACKLOG", 4.0),
        THREE_OF_FREE,
        "none waits",
        "MEMORY_BUSY",
    ),
    Shared(
        "bytes read that become KV",
        "engine",
        "inference_svc/turns/admission.py: restoring",
        ("inference_svc.config:_MAX_RESTORING_BYTES", 1 << 30),
        THREE_OF_FREE,
        IN_TURN,
        WAITS,
    ),
    Shared(
        "copies of KV that wait for the store",
        "engine",
        "inference_svc/turns/admission.py: publishing",
        ("inference_svc.config:EngineSettings.max_publishing_bytes", 512 << 20),
        THREE_OF_FREE,
        IN_TURN,
        WAITS,
    ),
    Shared(
        "formats that wait for their trial",
        "engine",
        "inference_svc/formats/reply_formats.py: _waiting",
        ("inference_svc.formats.reply_formats:_MAX_WAITING", 128),
        THREE_OF_FREE,
        "none waits",
        "FORMATS_BUSY",
    ),
    Shared(
        "trials of formats",
        "engine",
        "inference_svc/formats/reply_formats.py: _working",
        ("", 1),
        "one trial at a time",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "compiled formats",
        "engine",
        "inference_svc/formats/format_cache.py: _shares",
        ("inference_svc.formats.grammars:_MAX_KEPT", 32),
        THREE_OF_FREE,
        "of a namespace that has its share, the oldest goes first",
        "nothing: it is compiled again",
    ),
    Shared(
        "masks of a step",
        "engine",
        "inference_svc/engine/scheduling/mask_budget.py: _purses",
        ("inference_svc.engine.scheduling.mask_budget:PART", 0.25),
        "an equal part of a quarter of a step's other time, while others generate or wait",
        "turns of a namespace in turn; a namespace that overdraws sits out steps",
        WAITS,
    ),
    Shared(
        "seconds of a step of one reply format",
        "engine",
        "inference_svc/formats/grammar_trial.py: MAX_STEP_S",
        ("inference_svc.formats.grammar_trial:MAX_STEP_S", 0.01),
        "each format has its own",
        "none waits",
        "FORMAT_TOO_COMPLEX",
    ),
    Shared(
        "thread that tokenizes prompts",
        "engine",
        "inference_svc/model/prompting.py: _thread_room",
        ("", 1),
        "one prompt at a time",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "thread that parses requests' JSON",
        "engine",
        "inference_svc/model/prompting.py: _json_room",
        ("inference_svc.text.given_json:MAX_BYTES", 1 << 20),
        "one request at a time",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "thread that renders conversations above 1 MiB",
        "engine",
        "inference_svc/model/prompting.py: _render_room",
        ("", 1),
        "one conversation at a time",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "thread that counts tokens",
        "engine",
        "inference_svc/turns/turn_service.py: _counting",
        ("", 1),
        "one text at a time",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "thread of the embedding model",
        "engine",
        "inference_svc/embedding/embedding_model.py: _working",
        ("", 1),
        "one text at a time",
        IN_TURN,
        WAITS,
    ),
    Shared(
        "queue of the MLX thread",
        "engine",
        "inference_svc/engine/scheduling/scheduler.py: waiting",
        ("inference_svc.config:EngineSettings.max_turns", 256),
        "as of turns",
        IN_TURN + ", interactive before background",
        WAITS,
    ),
    Shared(
        "KV of running turns",
        "engine",
        "inference_svc/engine/scheduling/room_shares.py: _held",
        ("inference_svc.engine.scheduling.schedulable:Rules.kept_part", 8),
        "an equal part of seven eighths; more of what is free while no namespace below its part waits",
        IN_TURN + "; turns of namespaces above their part are preempted for interactive turns of those below",
        WAITS,
    ),
    Shared(
        "KV of hot memories",
        "engine",
        "inference_svc/engine/scheduling/hot_memories.py: _held",
        ("inference_svc.config:EngineSettings.memory_gib", 4.0),
        "an equal part; a namespace above it loses its own first",
        "the memory that is expected last goes first",
        WAITS,
    ),
    Shared(
        "batch rows of a step",
        "engine",
        "inference_svc/engine/scheduling/step_schedule.py: _seats",
        ("inference_svc.engine.scheduling.schedulable:Rules.rows_beside", 4),
        "4 beside others",
        "turns of a namespace in turn, each for 16 steps",
        WAITS,
    ),
    Shared(
        "prefill of a step",
        "engine",
        "inference_svc/engine/scheduling/pacing.py: owed_s",
        ("inference_svc.engine.scheduling.schedulable:Rules.longest_gap_s", 0.05),
        "as much time as each namespace that generates beside it",
        IN_TURN + ", cell by cell, interactive before background",
        WAITS,
    ),
    Shared(
        "connections whose requests showed no key",
        "gateway",
        "clients/python/kvasir_gateway/door/connections.py: _strangers",
        ("kvasir_gateway.door.connections:ConnectionLimits.strangers", 512),
        "for strangers alone; of few open files an eighth",
        "the oldest makes room for the newest",
        "a closed connection",
    ),
    Shared(
        "connections of key holders between two requests",
        "gateway",
        "clients/python/kvasir_gateway/door/connections.py: _resting",
        ("kvasir_gateway.door.connections:ConnectionLimits.resting", 1024),
        "none: one that is closed is opened again",
        "the oldest makes room for the newest",
        "a closed connection",
    ),
    Shared(
        "requests that are not answered yet",
        "gateway",
        "clients/python/kvasir_gateway/door/bodies.py: requests",
        ("kvasir_gateway.app:GatewayLimits.max_requests", 2000),
        THREE_OF_FREE,
        "none waits",
        "TOO_MANY_CALLS",
    ),
    Shared(
        "bodies, what parsing makes of them, and answers of embeddings",
        "gateway",
        "clients/python/kvasir_gateway/door/bodies.py: bodies",
        ("kvasir_gateway.app:GatewayLimits.max_bodies_bytes", 192 << 20),
        THREE_OF_FREE,
        "none waits",
        "PROMPTS_TOO_LARGE",
    ),
    Shared(
        "the thread that reads bodies, makes requests of them, compares memories and makes answers, from 16 KiB on",
        "gateway",
        "clients/python/kvasir_gateway/door/bodies.py: reading",
        ("", 1),
        "one body",
        IN_TURN,
        WAITS,
    ),
)

OWN = (
    Own("clients/python/kvasir_gateway/engine.py: few", "one request reads so many agents at once"),
    Own(
        "clients/python/kvasir/server/interceptors.py: room",
        "credentials of one namespace; where it is used has its row",
    ),
    Own("clients/python/kvasir/server/shared_room.py: _shares", "the count inside of a room; each room has its row"),
    Own("cachestore_svc/moving/inbound.py: outcomes", "one stream of blobs: its sender takes the answers, or waits"),
    Own("cachestore_svc/moving/inbound.py: _room", "one stream of blobs: 64 are whole and not durable at once"),
    Own("inference_svc/first_model.py: _next", "the one engine that takes the model which is loaded first"),
    Own("inference_svc/engine/mlx_thread.py: _mailbox", "letters of admitted turns, whose number has its row"),
)


def markdown() -> str:
    """The table as `clients/python/kvasir/server/SHARED.md` shows it."""
    lines = [
        "| shared | where | cap | share of a namespace | order | a refused caller gets |",
        "|---|---|---:|---|---|---|",
    ]
    for row in SHARED:
        told = f"`{row.told}`" if row.told.isupper() else row.told
        lines.append(
            f"| {row.resource} | {row.service} | {cap_text(row.cap[1])} | {row.share} | {row.order} | {told} |"
        )
    return "\n".join(lines)


def cap_text(cap: object) -> str:
    is_bytes = isinstance(cap, int) and cap >= 1 << 20 and cap % (1 << 20) == 0
    return f"{cap >> 20} MiB" if is_bytes else str(cap)  # type: ignore[operator]


if __name__ == "__main__":
    print(markdown())
