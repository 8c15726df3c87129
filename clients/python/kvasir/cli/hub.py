"""`kvasir models pull` and `rm`: models of the hub on this machine, through a program of the engine's package."""

from collections.abc import Sequence
from typing import Annotated, Any

from kvasir.cli.caller import Caller
from kvasir.cli.failures import NOT_FOUND, WrongUsage
from kvasir.cli.rows import size
from kvasir.cli.running.checks import check_installed, is_repository
from kvasir.cli.running.program import done
from kvasir.cli.showing.arguments import argument
from kvasir.cli.showing.reported import ProgressOption, is_progress
from kvasir.errors import FailedPrecondition, NotFound

_NameArgument = Annotated[str, argument("A repository of the hub.", "OWNER/NAME")]


def pull(caller: Caller, name: _NameArgument, progress: ProgressOption = False) -> None:
    """Fetch a model from the hub: `kvasir up --model OWNER/NAME` and other programs of mlx-lm then find it here."""
    answer = fetch(caller, name, "--progress") if progress else fetch(caller, name)
    text = f"{name}: {size(answer['size_bytes'])} at {answer['path']}; start it with `kvasir up --model {name}`"
    caller.result(answer, text)


def rm(caller: Caller, name: _NameArgument) -> None:
    """Remove a fetched model. Its agents' memories stay."""
    answer = _hub(caller, "rm", _checked(name))
    text = f"{name} is removed; {size(answer['freed_bytes'])} are free"
    caller.result(answer, text)


def fetched(caller: Caller) -> list[dict[str, Any]]:
    """The models that were fetched: name and size_bytes."""
    rows: list[dict[str, Any]] = _hub(caller, "ls")
    return rows


def fetch(caller: Caller, name: str, *options: str) -> dict[str, Any]:
    """Fetch what is missing here of a model; shows its progress. Raises NotFound."""
    # Its bars are drawn by itself, where somebody sees them.
    quiet = () if caller.shows_progress else ("--quiet",)
    answer: dict[str, Any] = _hub(caller, "pull", _checked(name), options=(*options, *quiet))
    return answer


def _checked(name: str) -> str:
    if not is_repository(name):
        raise WrongUsage(f"{name!r}: expected OWNER/NAME, as mlx-community/Llama-3.2-3B-Instruct-4bit", field="NAME")
    return name


def _hub(caller: Caller, *words: str, options: Sequence[str] = ()) -> Any:
    check_installed("engine")
    shown = caller.shows_progress

    def report(line: str) -> None:
        if is_progress(line):
            caller.note(line)

    ended = done("inference_svc.model.hub", [*words, *options], report, shows_stderr=shown)
    if ended.code == 0:
        return ended.value
    why = f"{words[-1]} was not found; see the messages above" if shown else ended.why
    if ended.code == NOT_FOUND:
        raise NotFound(why, reason="MODEL_NOT_FOUND", field="NAME")
    raise FailedPrecondition(f"the hub's loader failed: {why}", reason="HUB_FAILED")
