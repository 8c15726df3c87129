"""What a person types or a pipe holds, as texts: lines, or several lines between three double quotes."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from kvasir.cli.failures import WrongUsage

_QUOTES = '"""'


def texts(prompt: Callable[[], str], say: Callable[[str], None]) -> Iterator[str]:
    """Each text, without empty ones, until the input ends. `prompt` is asked before each line of a person.

    At a prompt the first Ctrl-C drops what was typed and says how to leave; the second, in a row, leaves."""
    is_person = sys.stdin.isatty()
    if is_person:
        _load_line_editing()
    was_interrupted = False
    while True:
        try:
            text = _text(prompt() if is_person else "", "... " if is_person else "")
        except EOFError:
            if is_person:
                sys.stdout.write("\n")  # the shell's prompt has a line of its own
            return
        except KeyboardInterrupt:
            if is_person:
                sys.stdout.write("\n")
            if was_interrupted or not is_person:
                raise
            was_interrupted = True
            say("Ctrl-C once more, Ctrl-D or /quit leaves.")
            continue
        was_interrupted = False
        if text:
            yield text


def _text(prompt: str, continued: str) -> str:
    line = input(prompt).strip()
    if not line.startswith(_QUOTES):
        return line
    lines = [line.removeprefix(_QUOTES)]
    try:
        while not lines[-1].endswith(_QUOTES):
            lines.append(input(continued).rstrip())
    except EOFError:
        raise WrongUsage(f"the input ends before the {_QUOTES} that ends a text; it is not said") from None
    lines[-1] = lines[-1].removesuffix(_QUOTES)
    return "\n".join(lines).strip()


def _load_line_editing() -> None:
    """Load arrow keys and history for `input`, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  importing it is what it is for
