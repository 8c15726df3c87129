"""Runs a measuring program of the engine: progress on its stderr, one JSON object on its stdout.

The SDK imports no service.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvasir.errors import FailedPrecondition


def run_program(
    module: str, arguments: Sequence[str], failure: str, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """The program's JSON. `say` gets its progress, line by line.

    Raises FailedPrecondition: `failure` and the program's last line.
    """
    last = ""
    with tempfile.TemporaryFile("w+") as out:
        argv = [sys.executable, "-m", module, *arguments]
        with ended_with_us(subprocess.Popen(argv, stdout=out, stderr=subprocess.PIPE, text=True)) as process:
            assert process.stderr is not None
            for line in process.stderr:
                last = line.strip() or last
                say(line.rstrip())
        if process.returncode:
            hint = "; install kvasir[engine]" if "No module named" in last else ""
            raise FailedPrecondition(f"{failure}: {last}{hint}")
        out.seek(0)
        results: dict[str, Any] = json.load(out)
    return results


@contextmanager
def ended_with_us(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """Waits for the process at the block's end. If the block is interrupted it ends the process: a signal that was for
    us alone, as SIGTERM is, has not reached it.
    """
    with process:
        try:
            yield process
        except BaseException:
            process.terminate()
            raise
