"""vLLM's KV connector for a cache store: prompts go on from stored KV, after a restart and on another host.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvasirConnector", "kv_role": "kv_both",
      "kv_connector_module_path": "kvasir.store_for_vllm.connector", "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"store": "unix:/path or HOST:PORT", "store_token_file": "…", "keep": 64,
      "waiting_mib": 4096}}'

vLLM's scheduler looks up the longest stored prefix in blocks of 256 tokens. A request waits until a thread has read
them, while others are computed; none is ever computed from blocks that could not be read. Behind a step the worker
copies blocks that came into vLLM's, and new ones, which another thread sends. A store that does not answer costs time,
and no request."""

import functools
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import snapshot_download
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvasir.clients import StoreClient
from kvasir.credentials import read_token
from kvasir.formats.block_hash import BLOCK_TOKENS
from kvasir.formats.digest import Digest
from kvasir.store_for_mlx_lm.weights import weights_of
from kvasir.store_for_vllm.reading import Load, warning
from kvasir.store_for_vllm.stored_kv import StoredKv
from kvasir.store_for_vllm.worker import Save, Worker
from kvasir.waits import PATIENCE_S, SOON_S

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_LOG = logging.getLogger("kvasir.store_for_vllm")
_WAITING_MIB = 4096  # copies that wait to be sent
# Settings of a model that decide its KV beside its files, the last three the code; not every version of vLLM has all.
_DECIDE = (
    *("dtype", "quantization", "quantization_config", "hf_overrides", "hf_config_path", "max_model_len"),
    *("model_impl", "model_class_overrides", "code_revision"),
)


@dataclass
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """Blocks that the worker reads in a step, and those that it keeps behind it, by request."""

    loads: dict[str, Load] = field(default_factory=dict)
    saves: dict[str, Save] = field(default_factory=dict)


class _InScheduler(KVConnectorBase_V1):  # type: ignore[misc]
    """The calls of vLLM's scheduler."""

    _planner: "_Planner"

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        found = self._planner.find(request, num_computed_tokens)
        return found, found > 0  # it waits until they are read

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._planner.allocate(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepPlan:
        return self._planner.plan(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._planner.loaded(connector_output.finished_recving or (), connector_output.invalid_block_ids)

    def reset_cache(self) -> bool:
        """vLLM's weights may be others from here on: nothing is read or kept until it starts again."""
        self._planner.close()
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def request_finished(self, request: "Request", _block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._planner.forget(request.request_id)
        return False, None


class KvasirConnector(_InScheduler):
    """For one device, and models all of whose layers keep every token. Raises ValueError for others. vLLM makes one in
    its scheduler and one in its worker; most methods here are calls of the worker."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        spec = _spec(vllm_config, kv_cache_config)
        layers = kv_cache_config.kv_cache_groups[0].layer_names
        settings = self._kv_transfer_config.kv_connector_extra_config
        token_file = settings.get("store_token_file")
        store = StoreClient.connect(
            settings.get("store", f"unix:{Path.home()}/.kvasir/run/store.sock"),
            token=read_token(Path(token_file)) if token_file else None,
        )
        stored = StoredKv(
            store,
            _model(vllm_config, spec, layers),
            [spec.unpadded_page_size_bytes // spec.block_size] * len(layers),
            keep=_whole(settings, "keep", 64),
        )
        if role == KVConnectorRole.SCHEDULER:
            self._planner = _Planner(stored, BLOCK_TOKENS // spec.block_size)
        else:
            waiting_mib = _whole(settings, "waiting_mib", _WAITING_MIB)
            self._worker = Worker(stored, layers, kv_cache_config.num_blocks, waiting_mib)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def start_load_kv(self, _context: "ForwardContext", **_: Any) -> None:
        self._worker.load(self._get_connector_metadata().loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request waits until all layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **_: Any) -> None:
        """All layers are saved behind the step."""

    def wait_for_save(self) -> None:
        self._worker.save(self._get_connector_metadata().saves)

    def get_finished(self, _requests: set[str]) -> tuple[set[str] | None, set[str] | None]:
        # Before it vLLM gives no request's blocks to others, also of one that was aborted.
        return None, self._worker.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed()

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()


# --- the scheduler's half ---


@dataclass(slots=True)
class _Planned:
    """A request: vLLM's blocks, and how many of ours are stored or on their way."""

    request: "Request"
    places: list[int]
    stored: int


class _Planner:
    """Knows which blocks of each request the store has. `parts`: vLLM's blocks in one of ours."""

    def __init__(self, stored: StoredKv, parts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stored = stored
        self._parts = parts
        self._found: dict[str, Sequence[Digest]] = {}
        self._requests: dict[str, _Planned] = {}
        self._loads: dict[str, Load] = {}
        self._loading: dict[str, set[int]] = {}
        self._failed: set[str] = set()  # requests of which a block could not be read: all is computed
        self._closed = False
        self._clock = clock
        self._retry_s = 0.0

    def find(self, request: "Request", computed: int) -> int:
        """Tokens that the store has beyond those. The last token is always computed."""
        if self._closed or request.request_id in self._failed or not _is_plain(request):
            return 0
        whole = (len(request.all_token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self._found[request.request_id] = found = self._ask(list(request.all_token_ids[:whole]))
        return 0 if request.skip_reading_prefix_cache else max(0, len(found) * BLOCK_TOKENS - computed)

    def _ask(self, tokens: list[int]) -> Sequence[Digest]:
        """vLLM's scheduler waits for the answer: a store that failed is left alone for a while."""
        if self._clock() < self._retry_s:
            return []
        with warning("nothing is read from the store"):
            return self._stored.find(tokens, SOON_S)
        self._retry_s = self._clock() + PATIENCE_S
        return []

    def allocate(self, request: "Request", places: list[int], external: int) -> None:
        """vLLM has allotted blocks; `external` tokens, the last ones found, are to be read."""
        name = request.request_id
        if self._closed or not _is_plain(request):
            return
        found = [] if name in self._failed else self._found.get(name, [])
        self._requests[name] = _Planned(request, [*places], len(found))
        if external:
            part_tokens = BLOCK_TOKENS // self._parts
            first = (len(found) * BLOCK_TOKENS - external) // part_tokens
            wanted = range(first // self._parts, len(found))
            self._loads[name] = Load(
                list(request.all_token_ids[: len(found) * BLOCK_TOKENS]),
                {number: (found[number].hash, found[number].size_bytes) for number in wanted},
                {number: [places[each] if each >= first else None for each in self._of(number)] for number in wanted},
            )
            self._loading[name] = {*places[first : len(found) * self._parts]}

    def loaded(self, names: Collection[str], failed: Collection[int]) -> None:
        """The worker is done with these requests' loads, and could not read those of vLLM's blocks."""
        for name in names:
            if not self._loading.pop(name, set()).isdisjoint(failed):
                self._failed.add(name)

    def close(self) -> None:
        """Read and keep nothing from here on."""
        _LOG.warning("the store is left alone from here on: vLLM's caches were reset, perhaps for other weights")
        self._closed = True
        self._requests.clear()

    def plan(self, step: "SchedulerOutput") -> StepPlan:
        """What to read in this step, and which blocks it completes."""
        plan = StepPlan(loads=self._loads)
        self._loads = {}
        computed = {each.req_id: each.num_computed_tokens for each in step.scheduled_new_reqs}
        for each in step.scheduled_new_reqs:
            self._now_at(each.req_id, [*each.block_ids[0]])
        others = step.scheduled_cached_reqs
        for name, new, before in zip(others.req_ids, others.new_block_ids, others.num_computed_tokens, strict=True):
            computed[name] = before
            if (planned := self._requests.get(name)) and new is not None:
                self._now_at(name, [*([] if name in others.resumed_req_ids else planned.places), *new[0]])
        for name, before in computed.items():
            if (planned := self._requests.get(name)) and (
                save := self._saved(planned, before + step.num_scheduled_tokens[name])
            ):
                plan.saves[name] = save
        return plan

    def forget(self, name: str) -> None:
        self._failed.discard(name)
        for known in (self._found, self._requests, self._loading):
            known.pop(name, None)

    def _now_at(self, name: str, places: list[int]) -> None:
        if planned := self._requests.get(name):
            planned.places = places

    def _saved(self, planned: _Planned, computed: int) -> Save | None:
        """New whole blocks, of tokens that are known: drafts may be refused."""
        tokens = planned.request.all_token_ids
        whole = min(computed, len(tokens)) // BLOCK_TOKENS
        if whole <= planned.stored:
            return None
        new = range(planned.stored, whole)
        planned.stored = whole
        places = {number: [planned.places[each] for each in self._of(number)] for number in new}
        return Save(list(tokens[: whole * BLOCK_TOKENS]), places)

    def _of(self, number: int) -> range:
        return range(number * self._parts, (number + 1) * self._parts)


# --- of vLLM ---


def _spec(config: "VllmConfig", cache: "KVCacheConfig") -> FullAttentionSpec:
    """What all layers keep. Raises ValueError for a model or a setting whose KV is not kept."""
    if (policy := config.kv_transfer_config.kv_load_failure_policy) != "recompute":
        raise ValueError(f"KvasirConnector: kv_load_failure_policy: expected recompute, got {policy}")
    if config.parallel_config.world_size > 1:
        raise ValueError("KvasirConnector: expected one device; tensor and pipeline parallelism are not supported")
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    if len(specs) != 1 or type(specs[0]) is not FullAttentionSpec or specs[0].sliding_window:
        raise ValueError(f"KvasirConnector: expected layers that all keep every token, got {specs}")
    if BLOCK_TOKENS % specs[0].block_size:
        raise ValueError(
            f"KvasirConnector: --block-size: expected a divisor of {BLOCK_TOKENS}, got {specs[0].block_size}"
        )
    return specs[0]


def _whole(settings: Mapping[str, Any], name: str, default: int) -> int:
    if (value := int(settings.get(name, default))) < 1:
        raise ValueError(f"KvasirConnector: {name}: expected at least 1, got {value}")
    return value


def _model(config: "VllmConfig", spec: FullAttentionSpec, layers: Sequence[str]) -> str:
    """Names all that decides the bytes of a token's KV: weights, types, layout, device and version."""
    model, draft = config.model_config, config.speculative_config
    device = torch.backends.cpu.get_cpu_capability() if current_platform.is_cpu() else ""
    settings = [getattr(model, name, "") for name in _DECIDE]
    return json.dumps(
        [
            _weights(model.model, model.revision, config.load_config.load_format, config.load_config.download_dir),
            *map(str, (*settings, draft and (draft.method, draft.model))),
            *(repr(spec), list(layers), str(config.attention_config.backend)),
            *(vllm_version, current_platform.get_device_name(), device),
        ]
    )


@functools.cache  # for the scheduler and the worker of a process
def _weights(model: str, revision: str | None, load_format: str, cache: str | None) -> str:
    """The digest of a folder, or of a model that was fetched. Raises ValueError where vLLM reads no safetensors."""
    folder = Path(model)
    if not folder.exists():
        folder = Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    if load_format not in ("auto", "hf", "safetensors") or not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"KvasirConnector: expected weights in *.safetensors, got {model} by --load-format {load_format}"
        )
    return weights_of([str(folder)])


def _is_plain(request: "Request") -> bool:
    """Whether its KV follows from its tokens and the model alone, and may be shared in the namespace."""
    others = (
        request.mm_features,
        request.lora_request,
        request.prompt_embeds,
        request.cache_salt,
        request.pooling_params,
    )
    return request.prompt_token_ids is not None and not any(each is not None and each != [] for each in others)
