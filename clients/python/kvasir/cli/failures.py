"""How a command ends: with an exit code and, if it failed, one line with the cause and the next step."""

import errno
import json
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from kvasir import errors
from kvasir.address import AddressError
from kvasir.cli.caller import Caller
from kvasir.cli.running.holding import holders
from kvasir.cli.running.home import Endpoint, Home
from kvasir.cli.showing.terminal import visible
from kvasir.credentials import CredentialFileError

OK, PROBLEMS, USAGE, UNREACHABLE, REFUSED, NOT_FOUND, DAMAGED, BUG, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 70, 130

HELP = (
    "Exit codes: 0 done; 1 done, and problems were found; 2 wrong usage; 3 a service cannot be reached, does not start "
    "or is too slow; 4 refused; 5 not found; 6 stored bytes are damaged; 70 internal error; 130 interrupted; "
    "143 ended by SIGTERM; 129 its terminal closed."
)


class WrongUsage(errors.InvalidArgument):
    """An option or argument that is wrong for any service. `field` names it as it is typed."""

    reason = "WRONG_USAGE"


EXIT_CODES: dict[type[errors.KvasirError], int] = {
    WrongUsage: USAGE,
    errors.Unavailable: UNREACHABLE,
    errors.DeadlineExceeded: UNREACHABLE,
    errors.NotFound: NOT_FOUND,
    errors.DataLoss: DAMAGED,
    errors.Internal: BUG,
    errors.Cancelled: INTERRUPTED,
}

HINTS: dict[type[errors.KvasirError], str] = {
    errors.Unavailable: "Is it running? Start it with `kvasir up`, or name it: --engine or --address (the store), and "
    "--token-file.",
    errors.DeadlineExceeded: "Try again, or look at `kvasir doctor`.",
    errors.Unauthenticated: "Name a token file with --token-file; a new token counts after `kvasir reload`.",
    errors.PermissionDenied: "Use a credential that has the role.",
    errors.DataLoss: "Run `kvasir store scrub` to find all that is damaged; an engine computes damaged blocks again.",
    errors.Conflict: "Look at `kvasir agents history`, then try again.",
    errors.Internal: "The service's log names the request; please report it.",
}

# For a service that answered, and gave its reason.
_ANSWERED = "Try again; `kvasir status` shows problems of the services."

# For reasons that mean more than their type.
HINTS_BY_REASON: dict[str, str] = {
    "SERVICE_DID_NOT_START": "",
    "NOT_RUNNING": "",
    "STORE_UNREACHABLE": "Is it running? `kvasir store serve`, or `kvasir up` with --store-listen, starts one there.",
    "SERVICE_SILENT": "It may be starting, or hang; look at `kvasir status` and `kvasir logs`.",
    "ADDRESS_IN_USE": "",
    "PEER_UNAVAILABLE": "Is it running there? On a Mac, may this program use the local network (Privacy & Security)?",
    "PEER_VERSION_DIFFERS": "Update the older Kvasir of the two, or change what is named (`kvasir agents label …`).",
    "PEER_FAILED": "Look at its log: `kvasir logs store` there.",
    "PEER_UNKNOWN": "`kvasir peers ls` lists them; `kvasir pair` makes one.",
    "PAIRING_REFUSED": "",
    "PAIRING_OVER": "",
    "CANNOT_CHECK": "A running store is stopped by `kvasir down`, or checked with --read-only; a lost index "
    "is rebuilt by `kvasir store recover`.",
    "CANNOT_SEAL": "Stop a running store with `kvasir down`; see `kvasir keys --help`.",
    "CANNOT_RECOVER": "A running store is stopped by `kvasir down`.",
    "MEMORY_DAMAGED": "`kvasir agents history AGENT` lists the versions, and `kvasir agents rollback AGENT VERSION` "
    "makes an older one the newest.",
    "MEMORY_EXCEEDED": "Request fewer tokens, or give the engine more: `kvasir up --memory-gib GIB`; `kvasir doctor` "
    "shows how many agents of how many tokens fit.",
    "MODEL_NOT_LOADED": "`kvasir models load NAME` loads one.",
    "AGENT_EXISTS": "Choose another name.",
    "AGENT_PINNED": "`kvasir agents pin AGENT --off` ends that; --force deletes it all the same.",
    "FILE_EXISTS": "Use --force to replace it.",
    "JOURNAL_DAMAGED": "`kvasir scenario run --fresh` begins a new one.",
    "RESULTS_DAMAGED": "",
    "BACKUP_DAMAGED": "Another backup is made in an empty folder.",
    "STORE_BUSY": "",
    "COMMAND_FAILED": "Please report it, with that file.",
}


def exit_code(error: errors.KvasirError) -> int:
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), REFUSED)


def hint(error: errors.KvasirError, home: Home) -> str:
    """A sentence with the next step, which names a home that is not the usual one; empty if the message has it
    already."""
    of_type = next((HINTS[kind] for kind in type(error).__mro__ if kind in HINTS), "")
    if isinstance(error, errors.Unavailable) and error.reason != errors.Unavailable.reason:
        of_type = _ANSWERED
    step = HINTS_BY_REASON.get(error.reason, of_type)
    return step if step.endswith(" there.") else step.replace("`kvasir ", f"`{home.command('')}")


def code_of(command: Callable[[], object], caller: Caller) -> int:
    """Run a command to its end; returns its exit code. No exception leaves it."""
    try:
        code = command()
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    # A signal's; completion's; and with 1 typer's, when nobody reads on: `kvasir agents ls | head -1`
    except SystemExit as end:
        return INTERRUPTED if isinstance(end.__context__, BrokenPipeError) else int(end.code or 0)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  whatever it is, a person reads one line
        if type(error).__name__ == "NoArgsIsHelpError" and not caller.as_json:
            sys.stderr.write(f"{error}\n")
            return USAGE
        return report(refusal_of(error), caller)
    return code if isinstance(code, int) else OK


def refusal_of(error: Exception) -> errors.KvasirError:
    """Any exception as a refusal with the next step. A bug's trace is kept in a file."""
    match error:
        case errors.KvasirError():
            return error
        case typer.TyperException():
            return _wrong_usage(error)
        case CredentialFileError():
            return errors.InvalidArgument(str(error), field="--token-file", reason="TOKEN_FILE_UNUSABLE")
        case AddressError():  # of a socket of the home: only a home that can be made is free of it
            return errors.InvalidArgument.of("--home", error)
        case UnicodeError():
            return WrongUsage("an argument or the input is not valid UTF-8")
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):  # it names neither file nor remedy
            where = f" ({os.fsdecode(error.filename)})" if error.filename else ""
            return errors.ResourceExhausted(
                f"the disk is full{where}: make room, and run the command again", reason="DISK_FULL"
            )
        case FileNotFoundError(filename=str() | bytes() as name):
            return errors.NotFound(f"{os.fsdecode(name)}: {error.strerror}", reason="FILE_NOT_FOUND")
        case FileExistsError(filename=str() | bytes() as name) if not Path(os.fsdecode(name)).is_dir():
            text = f"{os.fsdecode(name)}: a file is there; expected a directory, or a path where nothing is"
            return errors.FailedPrecondition(text, reason="FILE_REFUSED")
        case OSError(filename=str() | bytes() as name):
            whose = _of_whom(Path(os.fsdecode(name))) if isinstance(error, PermissionError) else ""
            return errors.FailedPrecondition(f"{os.fsdecode(name)}: {error.strerror}{whose}", reason="FILE_REFUSED")
        case OSError():
            return errors.FailedPrecondition(str(error), reason="FILE_REFUSED")
    with tempfile.NamedTemporaryFile("w", prefix="kvasir-", suffix=".trace", delete=False) as trace:
        traceback.print_exception(error, file=trace)
    return errors.Internal(f"{type(error).__name__}: {error} (details: {trace.name})", reason="COMMAND_FAILED")


def _of_whom(path: Path) -> str:
    """The owner of a path, or of its last directory that can be seen, if that is another user."""
    seen = next(each for each in (path, *path.absolute().parents) if os.access(each, os.F_OK))
    owner = seen.stat().st_uid
    return "" if owner == os.geteuid() else f": {seen} belongs to another user (uid {owner})"


def relayed(code: int, told: Mapping[str, Any]) -> errors.KvasirError:
    """The refusal of a command that ended with this code and this error in JSON, as one of our own."""
    kind = next((kind for kind, of_kind in EXIT_CODES.items() if of_kind == code), errors.FailedPrecondition)
    return kind(told["message"], reason=told["reason"], field=told.get("field"), metadata=told.get("metadata"))


def _wrong_usage(error: typer.TyperException) -> WrongUsage:
    """The command line's own refusal. `typer` names the fault, and its context the command whose help to read."""
    context = getattr(error, "ctx", None)
    [named, *_] = getattr(getattr(error, "param", None), "opts", None) or [getattr(error, "option_name", None)]
    option = named or getattr(error, "param_hint", None)
    said = error.format_message().strip().removesuffix(".").replace("Value error, ", "")
    if context is None:
        return WrongUsage(said, field=option)
    if context.parent and any(option in each.opts for each in context.find_root().command.params):
        command = context.command_path.partition(" ")[2]
        return WrongUsage(f"{option} stands before the command: kvasir {option} … {command}", field=option)
    if context.info_name == "chat" and "extra argument" in said:
        said += ": the message comes after --once"
    said = _in_group(context, said)
    end = "" if said.endswith("?") else "."
    return WrongUsage(f"{said}{end} See `{context.command_path} --help`", field=option)


def _in_group(context: typer.Context, said: str) -> str:
    """Typer's words, but of a command that groups have, as `ls`, with these in place of names that are alike."""
    wanted = re.match(r"No such command '(.+?)'", said)
    groups = getattr(context.command, "commands", {}).items()
    found = [
        f"'{name} {wanted[1]}'" for name, group in groups if wanted and wanted[1] in getattr(group, "commands", {})
    ]
    return f"{wanted[0]}. Did you mean {', '.join(found)}?" if wanted and found else said


@contextmanager
def naming(service: str, caller: Caller) -> Iterator[None]:
    """Replace gRPC's own words for "nobody answers there" by ours. A service's own words stay."""
    try:
        yield
    except (errors.Unavailable, errors.DeadlineExceeded) as error:
        is_grpcs = error.reason == type(error).reason
        endpoint = caller.store if service == "store" else caller.engine
        if is_grpcs and (pid := _pid_at(endpoint, service, caller.home)):
            text = f"the {service} (pid {pid}) lives and does not answer at {endpoint.address}"
            raise errors.Unavailable(text, reason="SERVICE_SILENT", metadata=error.metadata) from None
        if not is_grpcs or isinstance(error, errors.DeadlineExceeded) or "connect" not in error.message:
            raise
        text = f"no {service} answers at {endpoint.address}"
        raise errors.Unavailable(text, reason=error.reason, metadata=error.metadata) from None


def _pid_at(endpoint: Endpoint, service: str, home: Home) -> int:
    """The living process of a home's own service; 0 if there is none, or if another service is meant."""
    running = home.running()
    if running is None or endpoint.address != home.endpoint(service).address:
        return 0
    pid: int = getattr(running, f"{service}_pid")
    return pid if pid in holders(home.services_lock_file) else 0


def report(error: errors.KvasirError, caller: Caller) -> int:
    """Print the refusal where the caller looks for it, and return the command's exit code."""
    if caller.as_json:
        value = {"reason": error.reason, "message": error.message, "field": error.field, "metadata": error.metadata}
        try:
            caller.out.file.write(json.dumps({"error": value}) + "\n")
            caller.out.file.flush()
            return exit_code(error)
        except OSError:  # a `kvasir up -d` that was ready is read by nobody, but its log is; or a full disk
            pass
    # A service does not know its home, for which the command is typed.
    message = error.message.replace("run: kvasir ", f"run: {caller.home.command('')}").rstrip(".")
    end = "" if message.endswith("?") else "."
    line = " ".join(part for part in (f"kvasir: {message}{end}", hint(error, caller.home)) if part)
    sys.stderr.write(visible(" ".join(line.split())) + "\n")
    return exit_code(error)
