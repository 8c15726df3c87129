"""The table: every resource that callers share, the attack on it, and how much memory each service may come to take."""

from dataclasses import dataclass

from tests.campaigns.fairness import engine_attacks, gateway_attacks, store_attacks
from tests.campaigns.fairness.attacker import Attack


@dataclass(frozen=True)
class Row:
    """One resource, and who tries to have all of it."""

    name: str
    resource: str
    attack: Attack
    # Resident memory in MiB that no service may pass while it lasts. Idle they have about 90, 250 and 90.
    store_mib: int = 512
    engine_mib: int = 1024
    gateway_mib: int = 400

    @property
    def most_mib(self) -> dict[str, int]:
        return {"store": self.store_mib, "engine": self.engine_mib, "gateway": self.gateway_mib}


ROWS = (
    Row("strangers", "calls of the store (no credential)", store_attacks.silent_strangers),
    Row("silent", "calls of the store", store_attacks.silent_calls),
    Row("half-messages", "bytes of messages that arrive", store_attacks.half_messages),
    Row("find-missing", "index thread", store_attacks.find_missing),
    Row("stats", "index thread", store_attacks.stats),
    Row("list-agents", "index thread", store_attacks.list_agents),
    Row("fat-labels", "index thread, labels", store_attacks.fat_labels),
    Row("updates", "index thread, group commits", store_attacks.updates),
    Row("state-points", "index thread, schemas", store_attacks.state_points),
    Row("reading", "threads of the store", store_attacks.reading),
    Row("slow-readers", "bytes that wait for readers", store_attacks.slow_readers),
    Row("bogus-sizes", "bytes that wait for readers", store_attacks.bogus_sizes),
    Row("exports", "bytes of manifests", store_attacks.exports),
    Row("imports", "bytes of manifests", store_attacks.imports),
    Row("reservations", "disk", store_attacks.reservations),
    Row("engine-strangers", "calls of the engine (no credential)", engine_attacks.silent_strangers),
    Row("engine-silent", "calls of the engine", engine_attacks.silent_calls),
    Row("engine-half-messages", "bytes of messages that arrive", engine_attacks.half_messages),
    Row("long-turns", "places of turns, batch rows of a step", engine_attacks.long_turns),
    Row("long-prompts", "prefill", engine_attacks.long_prompts),
    Row("prompt-bytes", "bytes of prompts", engine_attacks.prompt_bytes),
    Row("kv-backlog", "KV that turns may come to need", engine_attacks.kv_backlog),
    Row("background", "KV, order of turns", engine_attacks.background),
    Row("restoring", "bytes that become KV", engine_attacks.restoring),
    Row("warming", "KV of hot memories", engine_attacks.warming),
    Row("format-trials", "trials of formats", engine_attacks.format_trials),
    Row("masks-8", "masks on the MLX thread", engine_attacks.masks_of_8),
    Row("masks-32", "masks on the MLX thread", engine_attacks.masks_of_32),
    Row("nested-json", "JSON in messages", engine_attacks.nested_json),
    Row("counting", "threads that tokenize", engine_attacks.counting),
    Row("unread", "bytes that wait for readers", engine_attacks.unread),
    Row("gateway-silent", "connections whose requests showed no key", gateway_attacks.silent_connections),
    Row("gateway-strangers", "turns of the gateway's event loop (no key)", gateway_attacks.strangers),
    Row("gateway-bodies", "bodies, and the thread that reads them", gateway_attacks.large_bodies, engine_mib=1536),
    Row("gateway-calls", "turns of the gateway's event loop", gateway_attacks.small_calls),
    Row("gateway-lists", "turns of the gateway's event loop", gateway_attacks.long_lists),
    Row("gateway-forms", "the page's forms, and its requests", gateway_attacks.large_forms),
)
