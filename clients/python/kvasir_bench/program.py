"""Programs that measure in a process of their own: `python -m kvasir_bench…` prints one JSON object on its stdout."""

import contextlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvasir.cli.running.program import run_program
from kvasir.errors import KvasirError

Say = Callable[[str], None]
# No turn that is measured takes longer.
MEASURED_WITHIN_S = 1800.0


def measured_by(
    module: str, failure: str, options: Mapping[str, object], say: Say = lambda _: None, *words: str
) -> dict[str, Any]:
    """What the program printed. An option that is None, empty or False is left out. Raises FailedPrecondition."""
    given = {name: value for name, value in options.items() if value not in (None, "", False)}
    arguments = [word for name, value in given.items() for word in ([name] if value is True else [name, str(value)])]
    return run_program(f"kvasir_bench.{module}", [*arguments, *words], failure, say)


def printed(measure: Callable[[], Mapping[str, Any]]) -> int:
    """Print what was measured, or the error on stderr; returns the program's exit code."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a log line would be no JSON
            results = measure()
    except (KvasirError, OSError) as error:
        progress(error.message if isinstance(error, KvasirError) else str(error))
        return 1
    print(json.dumps(results, indent=1))
    return 0


def keep(file: Path | None, results: Mapping[str, Any]) -> None:
    """Write what is known so far into the file, if there is one: all of it, or the file stays as it is. A full disk
    costs the file, and not the run.
    """
    if file is None:
        return
    place = file.resolve()
    new = place.with_name(f"{place.name}.new")
    try:
        new.write_text(json.dumps(results, indent=1), "utf-8")
        new.replace(place)
    except OSError as error:
        progress(f"{file}: not kept: {error.strerror}")
        with contextlib.suppress(OSError):
            new.unlink()


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
