"""What the system lets a service do: open many files, and leave no picture of its memory on a disk."""

import contextlib
import resource

# A descriptor per connection and per file that is read or written. macOS refuses more than the second.
_FILES = (65_536, 10_240)


def settle_limits() -> int:
    """Set both limits of this process. Returns how many files it may open."""
    forbid_core_dumps()
    return raise_file_limit()


def raise_file_limit() -> int:
    """Let this process open as many files as the system lets it; the usual 256 or 1,024 are few for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in _FILES:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or soft >= limit:
            break
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            break
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else max(_FILES)


def forbid_core_dumps() -> None:
    """A core dump holds memories, tokens and the keys of sealed namespaces in plain."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
