"""The engine: turns in, events out, memories kept between them. Start here. From any thread; nothing blocks."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, Unpack

from kvasir.errors import FailedPrecondition, InvalidArgument, ResourceExhausted, Unavailable
from kvasir.formats.block_file import FileBytes

from inference_svc.engine import api
from inference_svc.engine.device.device_errors import device_error
from inference_svc.engine.engine_worker import EngineWorker
from inference_svc.engine.files.held_turns import check_carried
from inference_svc.engine.files.incoming import Incoming
from inference_svc.engine.files.snapshots import PendingFiles, memory_snapshot, when_there
from inference_svc.engine.files.swapping import files_stored
from inference_svc.engine.mlx_thread import Letter, MlxThread
from inference_svc.engine.pinned_memory import PinnedMemory
from inference_svc.engine.reply_text import ReplyText
from inference_svc.engine.scheduling.hot_memories import Owed
from inference_svc.engine.scheduling.schedulable import DraftRules, Rules, SharedPass
from inference_svc.engine.sequence import Sequence
from inference_svc.formats.grammars import GrammarMatcher
from inference_svc.kv.batch.packed_pass import ROW_TOKENS
from inference_svc.model.blas import load_optimized_blas
from inference_svc.model.device_memory import keep_wired
from inference_svc.model.model_info import ModelInfo
from inference_svc.model.model_runner import ModelRunner, cell_limits
from inference_svc.model.open_model import ModelArguments, OpenedModel, open_model
from inference_svc.model.probing.compiling_apart import end_compiling

ResultT = TypeVar("ResultT")
# As `open_model`.
ModelOpener = Callable[[str | Path, ModelArguments, Callable[[str], None]], tuple[OpenedModel, ModelRunner]]
_DECODED_PART = 2  # decoded copies of what is being decoded may take this part of the budget, beside it


class TurnHandle:
    def __init__(self, sequence: Sequence, post: Callable[[Callable[[EngineWorker], Any]], "Future[Any]"]) -> None:
        self._sequence = sequence
        self._post = post

    def cancel(self) -> None:
        """End the turn before its next cell or token. Idempotent; without effect once the turn is over."""
        self._sequence.wants_cancel = True
        self._post(_nothing)  # wakes it

    def files_stored(self) -> None:
        """The files of `Preempted` have left RAM: other turns may be preempted."""
        self._post(lambda _worker: files_stored(self._sequence))

    def resume(self, files: Iterable[FileBytes] | Incoming) -> None:
        """The answer to `Wanted`: files of `Preempted`, in order. KV of missing or damaged ones is computed again."""
        incoming = files if isinstance(files, Incoming) else Incoming.of(files)
        self._post(lambda worker: worker.resume(self._sequence, incoming))
        incoming.watch(lambda: self._post(_nothing))

    def full_blocks(self, first_block: int, max_blocks: int) -> "Future[tuple[FileBytes, ...] | None]":
        """Files of the turn's full blocks of layers that keep all tokens: for another engine, ahead of `hold`."""
        return when_there(
            lambda: self._post(lambda worker: worker.leaving.full_blocks(self._sequence, first_block, max_blocks))
        )

    @property
    def can_be_held(self) -> bool:
        """False for a turn of a model that fills masks: it ends where it began."""
        return self._sequence.can_be_held

    def hold(self, sent_blocks: int = 0) -> "Future[api.HeldTurn | None]":
        """Stop the turn between two tokens, for another engine to go on with it; all events before that are emitted
        first. None if the turn has not begun, is ending or over. `sent_blocks`: of `full_blocks`, which are left out.
        The turn keeps its KV: `release` it, `give_away` it, or cancel it.
        """
        return self._post(lambda worker: worker.hold(self._sequence, sent_blocks))

    def release(self) -> None:
        """A held turn goes on here. Without effect otherwise."""
        self._post(lambda _worker: self._sequence.released())

    def give_away(self) -> None:
        """A held turn goes on in another engine: here it fails with Unavailable (TURN_MOVED) and leaves no memory."""
        self._post(lambda worker: worker.give_away(self._sequence))


class EngineMemories:
    def __init__(self, thread: MlxThread[EngineWorker], worker: EngineWorker, model: ModelInfo) -> None:
        self._thread = thread
        self._worker = worker
        self._model = model

    @property
    def is_copied_by_threads(self) -> bool:
        return self._worker.leaving.is_copied_by_threads

    def sizes(self) -> dict[api.AgentKey, int]:
        """Allocated KV bytes of each agent's, also of those that running turns extend."""
        return self._worker.memories.sizes()

    def get(self, key: api.AgentKey) -> api.HotMemory | None:
        """The key's memory as of its last whole turn. Counts as a use: it is evicted later."""
        self._worker.memories.expect_use(key)
        memory = self._worker.memories.get(key)
        return api.HotMemory(memory.state, memory.tag) if memory is not None else None

    def tag_of(self, key: api.AgentKey) -> object:
        memory = self._worker.memories.get(key)
        return memory.tag if memory is not None else None

    def tag(self, key: api.AgentKey, tag: object, owed: Owed | None = None) -> None:
        """Attach an object to the key's hot memory, until a turn changes that. `owed`: its way to the store."""
        if (memory := self._worker.memories.get(key)) is not None:
            memory.tag, memory.owed = tag, owed

    def drop(self, key: api.AgentKey) -> "Future[bool]":
        """Forget the key's memory, once no turn of the key runs; True if there was one."""
        return self._when_idle(key, lambda worker: worker.memories.drop(key))

    def drop_begun(self, of: api.AgentKey | str) -> "Future[None]":
        """Forget what cancelled turns of an agent, or of a namespace, have prefilled, and no memory."""
        return self._thread.post(lambda worker: worker.room.drop_begun(of))

    def fork(self, source: api.AgentKey, target: api.AgentKey, tag: object = None) -> "Future[bool]":
        """Give `target` the memory of `source`, without its tag, once no turn of it runs. False if there is none.
        `tag`: give it at once, and only while the memory has this tag."""
        if tag is not None:
            return self._thread.post(lambda worker: worker.leaving.fork(source, target, tag))
        return self._when_idle(source, lambda worker: worker.leaving.fork(source, target))

    def snapshot(
        self,
        key: api.AgentKey,
        first_block: int,
        *,
        blocks_only: bool = False,
        max_blocks: int | None = None,
        stored_windows: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> "Future[api.Snapshot | None]":
        """Tensor files of the key's memory from block `first_block` on; None if there is no memory. Waits until no turn
        of the key runs. `max_blocks`: at most so many, and the tail only with the memory's last block.
        `stored_windows`: by window, blocks of these tokens that the caller has. `blocks_only`: full blocks alone, at
        once, of the running turn if there is one. Bytes are copies: later turns do not change them. Rows from a turn's
        `cached_tokens` on may differ from those before it, even for equal tokens: publish from block `cached_tokens //
        256`.
        """

        def whole(worker: EngineWorker) -> PendingFiles[api.Snapshot] | None:
            return memory_snapshot(worker.memories.get(key), self._model, first_block, max_blocks, stored_windows)

        if blocks_only:
            return when_there(
                lambda: self._thread.post(lambda worker: worker.leaving.running_blocks(key, first_block, max_blocks))
            )
        return when_there(lambda: self._when_idle(key, whole))

    def pin(
        self,
        key: api.AgentKey,
        first_block: int,
        max_blocks: int,
        stored_windows: Mapping[int, Collection[int]] = MappingProxyType({}),
    ) -> "Future[PinnedMemory | None]":
        """Keep the key's memory as its last turn left it, and take its first piece: at most `max_blocks` from
        `first_block` on. The tail, windows and states come with the last block. None if there is no memory.
        `stored_windows`: by window, blocks of these tokens that the caller has. A turn that is submitted later changes
        nothing of it.
        """

        def pinned(worker: EngineWorker) -> PendingFiles[PinnedMemory] | None:
            taken = worker.leaving.pin(key, first_block, max_blocks, stored_windows)
            return None if taken is None else taken[1].made_into(PinnedMemory(taken[0], self._thread.post).with_first)

        return when_there(lambda: self._thread.post(pinned))

    def _when_idle(self, key: api.AgentKey, work: Callable[[EngineWorker], ResultT]) -> "Future[ResultT]":
        letter = Letter(work, Future())
        posted = self._thread.post(lambda worker: worker.when_idle(key, lambda: letter.deliver(worker)))
        posted.add_done_callback(lambda done: letter.result.cancel() if done.cancelled() else None)
        return letter.result


class EngineCosts:
    def __init__(self, thread: MlxThread[EngineWorker]) -> None:
        self._thread = thread

    def forget(self) -> "Future[None]":
        """Learn the costs of passes and steps again: those before were the first of their kinds."""
        return self._thread.post(lambda worker: worker.costs.forget())


class Engine:
    """One model, its thread, and the hot memories of the agents that it served."""

    def __init__(self, opened: OpenedModel, thread: MlxThread[EngineWorker], worker: EngineWorker) -> None:
        self.model = opened.info
        # mlx-lm's TokenizerWrapper (encode, apply_chat_template, eos_token_ids, tool parser). It holds no MLX arrays,
        # but may keep state while encoding: use it from one thread at a time.
        self.tokenizer = opened.tokenizer
        self.token_text = opened.token_text  # bytes and code points of tokens; thread-safe
        self.grammars = opened.grammars  # reply formats, compiled for this model's tokenizer; thread-safe
        self.vocabulary_size = opened.vocabulary_size  # token ids are below it
        self.device = opened.device  # "cpu", "metal" or "cuda"
        self.kernels = opened.kernels  # the implementations that serve, and a failure of their check
        self.directory = opened.directory  # of the model's files
        self.blas = load_optimized_blas() or ""  # file name of the optimized BLAS in use
        self.memory_budget_bytes = worker.room.total_bytes
        self.failed = thread.failed  # once its thread ended by an error: it serves nothing any more
        self._thread = thread
        self._worker = worker
        self.memories = EngineMemories(thread, worker, opened.info)
        self.costs = EngineCosts(thread)
        self._is_closed = False

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        memory_budget_bytes: int | Callable[[ModelInfo], int],
        longest_gap_s: float = Rules.longest_gap_s,
        drafts: DraftRules = DraftRules(),
        opener: ModelOpener = open_model,
        begin_phase: Callable[[str], None] = lambda _: None,
        start: Callable[[Callable[[], EngineWorker]], MlxThread[EngineWorker]] = MlxThread,
        **which: Unpack[ModelArguments],
    ) -> "Engine":
        """Start the MLX thread and load a model on it; blocks until it can serve. `model`: a directory that mlx-lm can
        load, or a Hugging Face repository name. `memory_budget_bytes` bounds all KV; it may be a function of the
        model's facts, which raises KvasirError where it has no room. A request for the policy `auto` measures the model
        first, unless its choice is known. `begin_phase` is called on the MLX thread with the name of each part of the
        work. `start` makes the worker on its own thread. See `ModelArguments`, `Rules` and `load` for the rest. Raises
        NotFound (no such model), FailedPrecondition (LAYER_NOT_KEPT, which names the layer and its class;
        MODEL_NOT_LOADABLE), InvalidArgument (policy, compute type), ResourceExhausted (the device has no room).
        """
        load_optimized_blas()
        opened: OpenedModel
        worker: EngineWorker

        def make_worker() -> EngineWorker:
            nonlocal opened, worker
            opened, runner = opener(model, which, begin_phase)
            begin_phase("pool")
            end_compiling()
            rules = _rules(opened.info, longest_gap_s, None if which.get("batch_invariant") else runner)
            most = _most_drafts(opened) if drafts.most is None else drafts.most
            rules = replace(rules, most_drafts=most, drafts_from_others=drafts.from_others)
            budget = memory_budget_bytes if isinstance(memory_budget_bytes, int) else memory_budget_bytes(opened.info)
            keep_wired(opened.info.weights_bytes + budget)
            worker = EngineWorker(runner, opened.info, budget, budget // _DECODED_PART, rules, time.monotonic)
            return worker

        try:
            thread = start(make_worker)
        except Exception as error:
            if (found := device_error(error)) is not None:  # also of a model that is not loadable for that
                raise found from None
            raise
        return cls(opened, thread, worker)

    @property
    def memory_used_bytes(self) -> int:
        """KV allocated after the last step, hot and running."""
        return self._worker.memory_used_bytes

    @property
    def computed_tokens(self) -> int:
        """Prompt and reply tokens of callers that went through the model since it was loaded."""
        return self._worker.computed_tokens

    def keep_graph(self, tokens: int, depth: int, rows: int = 1) -> "Future[None]":
        """Have the device keep the graph of a pass of so many tokens behind `depth` others, where it keeps such graphs:
        to make one delays the turn that is the first to need it. 0 tokens: of a step that decodes so many
        rows; else several rows are those of a packed pass."""
        return self._thread.post(lambda worker: worker.keep_graph(tokens, depth, rows))

    @property
    def preemptions(self) -> int:
        return self._worker.preemptions

    @property
    def silent_s(self) -> float:
        return self._thread.silent_s

    def needed_bytes(self, tokens: int) -> int:
        """KV bytes that a turn needs for so many tokens. Known before any byte is allocated."""
        return self._worker.room.most_bytes(tokens)

    def give_back(self, most_bytes: int, spared: Collection[api.AgentKey] = ()) -> "Future[int]":
        """Drop memories that the store has, but for `spared`, until KV needs so many bytes; returns the bytes that
        became free."""
        return self._thread.post(lambda worker: worker.give_back(most_bytes, spared))

    def submit(self, plan: api.TurnPlan, on_events: api.Listener) -> TurnHandle:
        """Queue a turn. `on_events` is called on the MLX thread, after every token and every cell, with all events
        since the last call, in order; it must return at once and not raise. The last event is exactly one `Ended` or
        `Failed`. Turns of different keys run interleaved; turns of one key run in the order of submission. Plan the
        turns of one key one by one: a plan depends on the memory that the turn before leaves. How many turns are open
        is the caller's to bound. Raises ResourceExhausted at once when the prompt and max_tokens cannot fit the
        context, or the empty KV budget; InvalidArgument for an invalid plan; Unavailable after close.
        """
        self._check(plan)
        sequence = Sequence(plan, self.model, self.token_text, time.monotonic, self._matcher(plan), on_events)
        if sequence.finish_reason is not None:
            raise InvalidArgument.of("carried.token_ids", "the reply has ended")
        posted = self._thread.post(lambda worker: worker.submit(sequence))
        if isinstance(plan.reuse, api.Restored) and plan.reuse.incoming is not None:
            plan.reuse.incoming.watch(lambda: self._thread.post(_nothing))
        posted.add_done_callback(lambda done: on_events([api.Failed(_closed())]) if done.cancelled() else None)
        return TurnHandle(sequence, self._thread.post)

    def close(self) -> None:
        """Fail all open turns with Unavailable, free the model, and end the thread; blocks until then. Idempotent."""
        self._is_closed = True
        self._thread.close()

    def _matcher(self, plan: api.TurnPlan) -> GrammarMatcher | None:
        """The plan's format for a new reply. The edge has compiled it; for other callers it is compiled now."""
        sampling = plan.sampling
        if sampling.constraint is None:
            return None
        return self.grammars.matcher(plan.namespace or "", sampling.constraint, sampling.stop_token_ids)

    def _check(self, plan: api.TurnPlan) -> None:
        if self._is_closed:
            raise _closed()
        if not plan.token_ids or len(plan.token_ids) != len(plan.token_chars):
            raise InvalidArgument("prompt: expected at least one token, and a count of characters for each")
        if plan.token_ids.largest >= self.vocabulary_size:
            raise InvalidArgument(f"prompt: expected token ids below {self.vocabulary_size}")
        biased = [token for token, _ in plan.sampling.logit_bias]
        for field, given in (("logit_bias", biased), ("stop_token_ids", plan.sampling.stop_token_ids)):
            if given and max(given) >= self.vocabulary_size:
                raise InvalidArgument.of(
                    f"sampling.{field}", f"expected token ids below {self.vocabulary_size}, got {max(given)}"
                )
        if plan.pooling is not None and not self.model.embedding_width:
            raise FailedPrecondition.of("model", "its hidden rows cannot be had", reason="NO_EMBEDDINGS")
        if plan.carried is not None:
            check_carried(plan, plan.carried, self.model, self.vocabulary_size)
        check_fits(len(plan.token_ids), plan.sampling.max_tokens, self.model.context_tokens)
        needed_bytes = self.needed_bytes(plan.most_tokens)
        if needed_bytes > self.memory_budget_bytes:
            raise ResourceExhausted(
                f"KV memory: the turn's KV may need {needed_bytes} bytes; the engine has {self.memory_budget_bytes}",
                reason="MEMORY_EXCEEDED",
                metadata={"needed_bytes": str(needed_bytes), "budget_bytes": str(self.memory_budget_bytes)},
            )


def told_text(engine: Engine, plan: api.TurnPlan, carried: api.CarriedTurn) -> str:
    """What a client has seen of a reply when its turn stands there."""
    reply = ReplyText(engine.token_text, plan.sampling, engine.model.stop_token_ids)
    return "".join(map(reply.push, carried.token_ids[len(plan.token_ids) :]))


def check_fits(
    prompt_tokens: int, max_tokens: int, context_tokens: int, *, field: str = "prompt", is_lower_bound: bool = False
) -> None:
    """Raise ContextExceeded, the field named, unless both fit. `is_lower_bound`: there may be more tokens."""
    if prompt_tokens + min(max_tokens, 1) > context_tokens:
        count = f"{'at least ' if is_lower_bound else ''}{prompt_tokens}"
        found = f"{count} tokens{', and one to generate,' if max_tokens else ''} are more"
    elif prompt_tokens + max_tokens > context_tokens:
        field, found = "sampling.max_tokens", f"{prompt_tokens} prompt tokens and {max_tokens} to generate are more"
    else:
        return
    raise api.ContextExceeded.of(
        field,
        f"{found} than the context of {context_tokens}",
        prompt_tokens=prompt_tokens,
        context_tokens=context_tokens,
    )


def _nothing(_worker: EngineWorker) -> None:
    """A letter that only wakes the thread."""


def _most_drafts(opened: OpenedModel) -> int:
    """None on Metal: no Mac has shown that replies with drafts are those without."""
    if opened.info.mask_window is not None:
        return opened.info.mask_window.size - 1
    return 0 if opened.device == "metal" else Rules.most_drafts


def _rules(model: ModelInfo, longest_gap_s: float, runner: ModelRunner | None) -> Rules:
    """`runner`: which cells may be cut to how many tokens, and share a pass; None: none may."""
    rules = Rules(cell_tokens=model.cell_tokens, least_tokens=model.cell_tokens, longest_gap_s=longest_gap_s)
    if runner is not None:
        least, packed = cell_limits(runner, model.kv_identity.policy)
        shared = SharedPass(ROW_TOKENS, packed) if packed else None
        rules = replace(rules, least_tokens=least or rules.least_tokens, shared_pass=shared)
    # Recurrent layers share no rows, and windows may have gone on: a turn would wait for its sibling in vain.
    return replace(rules, prefix_wait_s=0) if model.has_rewind_points else rules


def _closed() -> Unavailable:
    return Unavailable("the engine is shutting down", retry_after_s=1.0)
