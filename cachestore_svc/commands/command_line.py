"""The command line of the store's program: its options, and its exit codes."""

import argparse
from collections.abc import Callable
from pathlib import Path

from cachestore_svc.commands import seal_keys

# Exit codes. The last is that of `kvasir` for what is not there.
OK, FOUND_PROBLEMS, CANNOT_RUN, NO_STORE = 0, 1, 2, 5

_SERVE_OPTIONS: tuple[tuple[str, Callable[[str], object], str], ...] = (
    ("credentials-file", Path, "which callers are admitted, and in which roles; needed beyond a Unix socket"),
    ("tls-cert-file", Path, "the PEM certificate; needed beyond this machine"),
    ("tls-key-file", Path, "the certificate's key, readable by its owner only"),
    ("tls-client-ca-file", Path, "PEM certificates of the clients that may connect (mutual TLS)"),
    ("peers-file", Path, "other stores that agents may be pulled from (TOML)"),
    ("last-runs-dir", Path, "where the last commit of each store is noted, so that a start knows an older copy"),
    ("quota-bytes", int, "blob bytes that a namespace may hold; left out: only the disk limits it"),
    ("free-disk-reserve-bytes", int, "writes that would leave less than this on the disk are refused"),
    ("max-blob-bytes", int, "a larger blob is refused"),
    ("retained-versions", int, "versions kept per line, unless the agent says otherwise"),
    ("read-buffer-bytes", int, "bytes that all readers together may have waiting to be sent"),
    ("expires-after-s", float, "an agent that nobody used for so long is deleted; left out: it stays"),
    (
        "write-budget-bytes",
        int,
        "bytes of blobs, without index and journal, for a day (UTC); left out: only counted",
    ),
    ("write-budget-over", str, "tell (if left out), or refuse: what is done about writes beyond the budget"),
    ("scrub-bytes-per-s", int, "how fast blobs are hashed again in the background; 0: never"),
    ("scrub-every-s", float, "the rest between two such passes"),
    ("gc-interval-s", float, "garbage is collected this often"),
    ("stall-timeout-s", float, "a transfer without progress for this long is given up"),
    ("move-patience-s", float, "an agent whose move's destination is silent for so long stays here"),
    ("audit-file", Path, "where one JSON line says who did what that needs a privilege; see `kvasir audit`"),
    ("metrics-listen", str, "127.0.0.1:PORT for Prometheus metrics and /healthz, to this machine only"),
    ("traces-to", str, "http://127.0.0.1:4317, where OpenTelemetry gets spans; needs kvasir[traces]"),
    ("stop-grace-s", float, "how long running calls may go on after SIGTERM"),
)


def parser() -> argparse.ArgumentParser:
    """All commands but those of `pairing`."""
    program = argparse.ArgumentParser(
        prog="cachestore_svc",
        description="The cache store of Kvasir. `pair` and `peers` (each with --help) make it known to other stores.",
    )
    commands = program.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    # The settings that belong in a supervisor's command line; every field can also be set by KVASIR_STORE_… .
    shared.add_argument("--data-dir", type=Path, help="where everything is kept")
    shared.add_argument("--grace-period-s", type=float, help="how long an unreferenced blob is kept")
    shared.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="the least of what is logged"
    )
    shared.add_argument("--log-format", choices=("console", "json"), help="lines for people, or for programs")
    shared.add_argument("--seal-key-file", type=Path, help="the master key that opens sealed namespaces")
    shared.add_argument("--seal-keychain", help="its name in the keychain, where it is kept there")
    shared.add_argument("--sealed-file", type=Path, help="lists the namespaces that are never plain; `keys` writes it")
    seal_keys.add_parser(commands, shared)
    serve_ = commands.add_parser("serve", parents=[shared], help="serve it over gRPC")
    serve_.add_argument("--listen", help="unix:/path, host:port or [v6]:port")
    serve_.add_argument("--engine-listen", help="unix:/path for engines of this machine, beside --listen")
    serve_.add_argument(
        "--accept-older",
        action="store_true",
        default=None,
        help="start with data that are older than what last ran in this directory: a backup that was put back",
    )
    for name, kind, what in _SERVE_OPTIONS:
        serve_.add_argument(f"--{name}", type=kind, help=what)
    for name, what in (("check", "walk index and files both ways"), ("scrub", "hash every blob again")):
        command = commands.add_parser(name, parents=[shared], help=what)
        command.add_argument("--json", action="store_true")
        if name == "check":
            command.add_argument("--repair", action="store_true", help="repair the damage that can be repaired")
    recover_ = commands.add_parser(
        "recover",
        parents=[shared],
        help="rebuild a lost or damaged index",
        description="Rebuild the index from the journal, the manifests and the blob files; the old one is kept. "
        "For a store that refuses to start, or says INDEX_DAMAGED. The store must not run meanwhile.",
    )
    recover_.add_argument("--json", action="store_true")
    recover_.add_argument(
        "--namespace", action="append", help="a namespace that holds blobs, where no journal tells its name; repeatable"
    )
    gc = commands.add_parser("gc", parents=[shared], help="remove what nothing names")
    gc.add_argument("--json", action="store_true")
    gc.add_argument("--dry-run", action="store_true", help="report only")
    return program
