"""mlx_lm.server beside Kvasir: a process of its own with the same model, which is sent the same turns over HTTP."""

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from kvasir.errors import KvasirError, Unavailable
from kvasir.syncing import Scratch
from kvasir.waits import PATIENCE_S, PAUSE_S, WORK_S

from kvasir_bench.load import run
from kvasir_bench.load.http import HttpTarget, connected

NAME = "mlx_lm.server"
_MODULE = "kvasir_bench.engine.mlx_lm_server"
# Behind MLX no other BLAS than its wheel's is loaded.
_BY_WHEEL = f"import runpy, mlx.core; runpy.run_module({_MODULE!r}, run_name='__main__')"


async def measured(
    model: str,
    scope: run.LoadScope,
    tokens_per_word: float | None,
    say: Callable[[str], None],
    *,
    wheels_blas: bool = False,
) -> dict[str, Any]:
    """The load's results of mlx_lm.server, and how it `serves`; or why it was `left_out`: it may not know the model."""
    try:
        with Scratch("kvasir-bench-mlx-lm-") as logs:
            async with serving(model, scope.at_once or 0, logs, wheels_blas=wheels_blas) as target:
                await run.tokens_per_word(target, scope)  # it answers now, and has compiled what it compiles
                found = await run.run(target, scope, say, tokens_per_word=tokens_per_word)
                return {"name": NAME, "serves": (logs / "out").read_text().strip(), **found}
    except KvasirError as error:
        return {"name": NAME, "left_out": error.message}


@asynccontextmanager
async def serving(model: str, rows: int, logs: Path, *, wheels_blas: bool = False) -> AsyncGenerator[HttpTarget, None]:
    """The server, until the block's end. Raises Unavailable with its last line."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = ["-Pc", _BY_WHEEL] if wheels_blas else ["-Pm", _MODULE]
    argv = [sys.executable, *program, model, str(port), str(rows)]
    with _process(argv, logs) as process:
        async with connected(f"http://127.0.0.1:{port}", "default_model", "") as target:
            try:
                await _ready(process, port)
                yield target
            except KvasirError as error:
                lines = (logs / "err").read_text(errors="replace").splitlines()
                raise Unavailable(": ".join([error.message, *lines[-1:]])) from None


@contextmanager
def _process(argv: list[str], logs: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A process until the block's end, whose lines go into the files `out` and `err`. Its input ends with us."""
    with (logs / "out").open("wb") as out, (logs / "err").open("wb") as err:
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=out, stderr=err)
    with process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S)
            process.kill()


async def _ready(process: "subprocess.Popen[bytes]", port: int) -> None:
    for _ in range(round(WORK_S / PAUSE_S)):
        if process.poll() is not None:
            raise Unavailable("it ended while it started")
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(PAUSE_S)
    raise Unavailable(f"it does not listen after {WORK_S:.0f} s")
