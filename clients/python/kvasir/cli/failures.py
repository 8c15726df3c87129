"""How a refusal ends a command: with one line that says what happened and what to do next, and an exit code."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvasir import errors
from kvasir.cli.caller import Caller
from kvasir.cli.running.home import Endpoint
from kvasir.credentials import CredentialFileError

OK, PROBLEMS, USAGE, UNREACHABLE, REFUSED, NOT_FOUND, DAMAGED, BUG, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 70, 130

HELP = (
    "Exit codes: 0 done; 1 done, and problems were found; 2 wrong usage; 3 a service cannot be reached or is too slow; "
    "4 refused; 5 not found; 6 stored bytes are damaged; 70 internal error; 130 interrupted."
)

EXIT_CODES: dict[type[errors.KvasirError], int] = {
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
    errors.Unauthenticated: "Name a token file with --token-file.",
    errors.PermissionDenied: "Use a credential that has the role.",
    errors.DataLoss: "Run `kvasir store scrub` to find all that is damaged; an engine computes damaged blocks again.",
    errors.Conflict: "Look at `kvasir agents history`, then try again.",
    errors.Internal: "The service's log names the request; please report it.",
}

# For reasons that say more than their type.
HINTS_BY_REASON: dict[str, str] = {
    "SERVICE_DID_NOT_START": "",
    "ADDRESS_IN_USE": "",
    "PEER_UNAVAILABLE": "Is it running there? On a Mac, may this program use the local network (Privacy & Security)?",
    "PEER_UNKNOWN": "Peers stand in peers.toml; see compose/README.md.",
    "ALREADY_EXISTS": "Choose another name; an import adds a version with --replace.",
}


def exit_code(error: errors.KvasirError) -> int:
    return next((EXIT_CODES[kind] for kind in type(error).__mro__ if kind in EXIT_CODES), REFUSED)


def hint(error: errors.KvasirError) -> str:
    """A sentence that says what to do next; empty if the message says it already."""
    if error.reason in HINTS_BY_REASON:
        return HINTS_BY_REASON[error.reason]
    return next((HINTS[kind] for kind in type(error).__mro__ if kind in HINTS), "")


@contextmanager
def naming(service: str, endpoint: Endpoint) -> Iterator[None]:
    """Replace gRPC's own words for "nobody answers there" by ours. A service's own words stay."""
    try:
        yield
    except errors.Unavailable as error:
        if error.reason != errors.Unavailable.reason or "connect" not in error.message:
            raise
        text = f"no {service} answers at {endpoint.address}"
        raise errors.Unavailable(text, reason=error.reason, metadata=error.metadata) from None


def unusable_token(error: CredentialFileError) -> errors.KvasirError:
    """The refusal for a token file that cannot be used: the caller can mend it."""
    return errors.InvalidArgument(str(error), field="--token-file", reason="TOKEN_FILE_UNUSABLE")


def report(error: errors.KvasirError, caller: Caller) -> int:
    """Print the refusal where the caller looks for it, and return the command's exit code."""
    if caller.as_json:
        value = {"reason": error.reason, "message": error.message, "field": error.field, "metadata": error.metadata}
        caller.out.file.write(json.dumps({"error": value}, ensure_ascii=False) + "\n")
    else:
        line = " ".join(part for part in (f"kvasir: {error.message.rstrip('.')}.", hint(error)) if part)
        sys.stderr.write(line.replace("\n", " ") + "\n")
    return exit_code(error)
