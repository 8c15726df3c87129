"""The engine: turns in, events out, memories kept between them. Start here.

Everything that computes lives on one thread (`mlx_thread`), which this class feeds through its mailbox. All methods may
be called from any thread, do not block, and touch no tensor; what they return is plain data (`plan`) or a future of it.
"""

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from kvasir.cachestore.v1 import identity_pb2

from inference_svc.plan import Event, HotMemory, ModelInfo, SequenceKey, Snapshot, TurnPlan
from inference_svc.token_text import TokenText

OnEvents = Callable[[list[Event]], None]


class TurnHandle:
    """A submitted turn."""

    def cancel(self) -> None:
        """End the turn before its next cell or token. Idempotent; without effect once the turn is over."""
        raise NotImplementedError


class Engine:
    """One model, its thread, and the hot memories of the agents that it served."""

    @classmethod
    def open(
        cls,
        model: str | Path,
        *,
        cache_dir: Path,
        memory_budget_bytes: int,
        policy: identity_pb2.KvPolicy | None = None,
        context_tokens: int | None = None,
        compute_type: str | None = None,
        max_queued_turns: int = 256,
    ) -> "Engine":
        """Start the MLX thread and load a model on it; blocks until it can serve.

        `model`: a directory that mlx-lm can load, or a Hugging Face repository name. `cache_dir` keeps weights digests
        by file identity. `memory_budget_bytes` bounds all KV, hot and running. `policy`: None for the default (4 bits,
        groups of 64). `compute_type`: None for float32 on a CPU, else the model's own. Raises NotFound (no such model),
        FailedPrecondition (reason LAYER_NOT_KEPT, the layer and its class named), InvalidArgument (policy).
        """
        raise NotImplementedError

    @property
    def model(self) -> ModelInfo:
        """The loaded model."""
        raise NotImplementedError

    @property
    def tokenizer(self) -> object:
        """mlx-lm's TokenizerWrapper (encode, apply_chat_template, eos_token_ids, tool parser). It holds no MLX arrays,
        but may keep state while encoding: use it from one thread at a time.
        """
        raise NotImplementedError

    @property
    def token_text(self) -> TokenText:
        """Bytes and code points of tokens, built once. Thread-safe."""
        raise NotImplementedError

    @property
    def device(self) -> str:
        """ "cpu", "metal" or "cuda"."""
        raise NotImplementedError

    @property
    def blas(self) -> str:
        """File name of the optimized BLAS in use; empty when there is none."""
        raise NotImplementedError

    @property
    def memory_used_bytes(self) -> int:
        """KV allocated now, hot and running."""
        raise NotImplementedError

    def submit(self, plan: TurnPlan, on_events: OnEvents) -> TurnHandle:
        """Queue a turn. `on_events` is called on the MLX thread, at most once per step, with all events of that step,
        in order; it must return at once and not raise. The last event is `Ended` or `Failed`, always exactly one of
        them.

        Turns of different keys run interleaved; turns of one key run in the order of submission (but plan them one by
        one: a plan depends on the memory that the turn before leaves). Raises ResourceExhausted at once when the prompt
        and max_tokens cannot fit the context, or the KV budget even with all else dropped, or the queue is full;
        Unavailable after close.
        """
        raise NotImplementedError

    def hot_memory(self, key: SequenceKey) -> HotMemory | None:
        """The key's memory as of its last whole turn. Counts as a use: it is evicted later."""
        raise NotImplementedError

    def tag_hot(self, key: SequenceKey, tag: object) -> None:
        """Attach anything (say, the store version that equals this memory) to the key's hot memory. A turn that changes
        the memory removes the tag. Without effect if there is no memory.
        """
        raise NotImplementedError

    def drop_hot(self, key: SequenceKey) -> "Future[bool]":
        """Forget the key's memory, once no turn of it runs; True if there was one."""
        raise NotImplementedError

    def fork_hot(self, source: SequenceKey, target: SequenceKey) -> "Future[bool]":
        """Give `target` the memory of `source`, tag included, without copying rows until one of them writes. False if
        there is none.
        """
        raise NotImplementedError

    def snapshot(self, key: SequenceKey, first_block: int, *, blocks_only: bool = False) -> "Future[Snapshot | None]":
        """Tensor files of the key's memory from block `first_block` on; None if there is no memory.

        With `blocks_only`, full blocks alone, and of the running turn if one runs. Bytes are copies: later turns do not
        change them.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Fail what runs with Unavailable, free the model, end the thread cleanly; blocks until it has. Idempotent."""
        raise NotImplementedError
