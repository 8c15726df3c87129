"""The command line of the store's program: its options, and its exit codes."""

import argparse

from kvasir.options.finding import add_options
from kvasir.options.table import options_of
from kvasir.options.texts import path_of

from cachestore_svc.commands import seal_keys
from cachestore_svc.config import StoreSettings

OK, FOUND_PROBLEMS, CANNOT_RUN, NO_STORE = 0, 1, 2, 5  # exit codes; the last is `kvasir`'s for a missing thing

# What the commands that look after the data need to know of its store.
_OF_DATA = (
    "data_dir",
    "catalog",
    "grace_period_s",
    "log_level",
    "log_format",
    "seal_key_file",
    "seal_keychain",
    "sealed_file",
    "blobs",
    "blob_credentials_file",
)


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(
        prog="cachestore_svc",
        description="The cache store of Kvasir. `pair` and `peers` (each with --help) make it known to other stores.",
    )
    commands = program.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    add_options(shared, StoreSettings, _OF_DATA)
    seal_keys.add_parser(commands, shared)
    serve_ = commands.add_parser("serve", parents=[shared], help="serve it over gRPC")
    add_options(serve_, StoreSettings, [name for name in options_of(StoreSettings) if name not in _OF_DATA])
    for name, what in (("check", "walk index and files both ways"), ("scrub", "hash every blob again")):
        command = commands.add_parser(name, parents=[shared], help=what)
        command.add_argument("--json", action="store_true")
        if name == "check":
            command.add_argument("--repair", action="store_true", help="repair the damage that can be repaired")
            beside = "check a copy of the index; beside a store that runs, too"
            command.add_argument("--read-only", action="store_true", help=beside)
            add_options(command, StoreSettings, ["accept_older"])
    copy = commands.add_parser("copy-index", parents=[shared], help="write a copy of the index; the store may run")
    copy.add_argument("--into", type=path_of, required=True, help="the new file")
    recover_ = commands.add_parser(
        "recover",
        parents=[shared],
        help="rebuild a lost or damaged index",
        description=(
            "Rebuild the index from the journal, the manifests and the blob files; the old one is kept. For a store "
            "that refuses to start, or reports INDEX_DAMAGED. Stop the store first."
        ),
    )
    recover_.add_argument("--json", action="store_true")
    recover_.add_argument(
        "--namespace", action="append", help="a namespace that holds blobs, where no journal tells its name; repeatable"
    )
    gc = commands.add_parser("gc", parents=[shared], help="remove what nothing names")
    gc.add_argument("--json", action="store_true")
    gc.add_argument("--dry-run", action="store_true", help="report only")
    return program
