"""The processor's part of a step beside the device: `python -m kvasir_bench.played.step_cost --rows 1 16 64`.

A real service decodes with a model that computes nothing, for readers in another process. CPU time of the engine's
thread, of the event loop's and of the process, for each step in which all rows decode. Two trees are compared by runs
that take turns on one machine.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from kvasir.cachestore.v1 import identity_pb2
from kvasir.clients import AioInferenceClient
from kvasir.syncing import SHORT_ROOT, Scratch
from kvasir.waits import LOOK_S, WORK_S

from inference_svc.engine.engine import Engine
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.pages.pool import KvPool
from inference_svc.serving import serve_by_arguments
from kvasir_bench.played import played_model

_SHAPE = "llama-3.1-8b-6l"
_PROMPT = "word " * 2000
_LIKELY = 20.0


class StepMeter:
    """Clocks at the first and the last step of so many rows."""

    def __init__(self) -> None:
        self.wanted = self._steps = 0
        self._loop_clock = time.pthread_getcpuclockid(threading.get_ident())
        self._first = self._last = np.zeros(4)

    def stepped(self, rows: int) -> None:
        """On the engine's thread."""
        if rows == self.wanted:
            seconds = (time.perf_counter(), time.thread_time(), time.clock_gettime(self._loop_clock))
            self._last = np.array((*seconds, time.process_time()))
            self._first = self._last if not self._steps else self._first
            self._steps += 1

    def begin(self, rows: int) -> None:
        self.wanted, self._steps = rows, 0

    @property
    def found(self) -> dict[str, float]:
        """Microseconds for each step."""
        steps = self._steps - 1
        each = (self._last - self._first) / steps * 1e6
        names = ("wall_us", "engine_us", "loop_us", "process_us")
        return {"steps": steps, **{name: round(float(us), 1) for name, us in zip(names, each, strict=True)}}


class _Nothing:
    """A layer of a pass that computes nothing, and the pages of a prompt, which nobody reads."""

    begin = append = forget = staticmethod(lambda *_given: None)
    reply = staticmethod(lambda _kv: 0)


class IdleBatch(DecodeBatch):
    """Makes a step's arguments as a device with kernels wants them; the next tokens are drawn blindly."""

    def __init__(self, pool: KvPool, logits: mx.array, meter: StepMeter) -> None:
        super().__init__(pool, lambda tokens, _layers: self._blind(tokens), 0)
        self._fused, self._decoded = {index: _Nothing() for index in pool.formats}, {}  # type: ignore[misc]
        self._all, self._meter, self._chance = logits, meter, np.random.default_rng(7)

    def _blind(self, tokens: mx.array) -> mx.array:
        self._meter.stepped(len(self))
        chosen = self._chance.integers(0, self._all.shape[0], tokens.shape[0], dtype=np.uint32)
        return self._all[mx.array(chosen)][:, None]

    def _behind_writes(self, logits: mx.array) -> mx.array:
        return logits


class IdleRunner(played_model.PlayedRunner):
    """Prompts take pages, which stay as they are."""

    pages = _Nothing()  # type: ignore[assignment]
    takes_pool_at_once = False
    meter: StepMeter

    def new_pool(self, policy: identity_pb2.KvPolicy, budget_bytes: int = 1 << 30, **_given: Any) -> KvPool:
        identity = identity_pb2.KvIdentity(layers=self.layers[:1], policy=policy)  # of which a crowd fits in memory
        return KvPool(identity, budget_bytes, is_allocated=False)

    def new_batch(self, pool: KvPool, decoded_budget: int) -> DecodeBatch:  # noqa: ARG002 - nothing is decoded
        logits = np.zeros((len(self._words), self.vocabulary_size), dtype=np.float32)
        logits[range(len(self._words)), list(self._words)] = _LIKELY
        return IdleBatch(pool, mx.array(logits), self.meter)


async def _read(address: str, asked: argparse.Namespace, rows: int) -> int:
    """Read so many replies at once; returns how many messages came."""

    async def one(number: int) -> int:
        prompt, sampling = f"{number} {_PROMPT}", {"max_tokens": asked.tokens, "temperature": asked.temperature}
        said: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if asked.chat else {"prompt": prompt}
        return len([None async for _ in client.generate(**said, sampling=sampling, timeout_s=WORK_S)])

    async with AioInferenceClient.connect(address) as client:
        return sum(await asyncio.gather(*map(one, range(rows))))


def _measure(address: str, argv: Sequence[str], rows: Sequence[int], meter: StepMeter) -> None:
    """Beside the service, in a thread of its process: readers of each number of rows, then the service's end."""
    try:
        path = Path(address.removeprefix("unix:"))
        while not path.exists():
            time.sleep(LOOK_S)
        for count in rows:
            meter.begin(count)
            reader = [sys.executable, "-Pm", "kvasir_bench.played.step_cost", *argv, "--read", address, str(count)]
            messages = int(subprocess.run(reader, check=True, capture_output=True, timeout=WORK_S).stdout)
            print(json.dumps({"rows": count, **meter.found, "messages": messages}), flush=True)
    finally:
        signal.raise_signal(signal.SIGTERM)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m kvasir_bench.played.step_cost", allow_abbrev=False)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64], help="replies at once")
    parser.add_argument("--tokens", type=int, default=256, help="of each reply")
    parser.add_argument("--chat", action="store_true", help="send messages, whose replies are read for parts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    if asked.read:
        print(asyncio.run(_read(asked.read[0], asked, int(asked.read[1]))))
        return 0
    IdleRunner.meter, name = StepMeter(), f"{played_model.NAME_PREFIX}{_SHAPE}={_SHAPE}"
    with Scratch("kvasir-step-cost-", SHORT_ROOT) as home:
        address = f"unix:{home}/s"
        opener = partial(played_model.open_played, runner_class=IdleRunner)
        arguments = ["serve", "--listen", address, "--model", name, "--memory-gib", "8", "--state-dir", str(home)]
        given = sys.argv[1:] if argv is None else argv
        threading.Thread(target=_measure, args=(address, given, asked.rows, IdleRunner.meter), daemon=True).start()
        return serve_by_arguments(arguments, partial(Engine.open, opener=opener))


if __name__ == "__main__":
    sys.exit(main())
