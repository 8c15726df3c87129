"""`kvasir store …`: serve a store, and look after a running one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvasir.cli.agents import store_client
from kvasir.cli.caller import Caller, JsonOption, caller_of, command
from kvasir.cli.failures import DAMAGED, NOT_FOUND, WrongUsage
from kvasir.cli.fleet.serving_store import serve_store
from kvasir.cli.rows import counted, fields_of, scrub_row, scrub_text, size, stats_row
from kvasir.cli.running.checks import check_installed
from kvasir.cli.running.home import Home
from kvasir.cli.running.program import done
from kvasir.cli.settings.showing import last_value
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.progress import counting_progress
from kvasir.cli.showing.tables import pairs
from kvasir.errors import FailedPrecondition, NotFound
from kvasir.formats.digest import Digest
from kvasir.options.finding import environment
from kvasir.options.store import StoreTable

app = typer.Typer(help="Manage the store.", no_args_is_help=True)


@app.command(
    "serve", add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def serve(
    context: typer.Context,
    detach: Annotated[bool, option("Return when the store is ready.", "--detach", "-d")] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a cache store alone, for engines on other machines. --help shows its options."""
    check_installed("store")
    serve_store(caller_of(context, as_json), context.args, detach=detach)


@command(app, "check")
def check(
    caller: Caller,
    data_dir: Annotated[Path | None, option("The store's data. Default: the data of the home.")] = None,
    repair: Annotated[bool, option("Also repair what can be repaired.", "--repair")] = False,
    read_only: Annotated[bool, option("Check a copy of the index. The store may run.", "--read-only")] = False,
) -> None:
    """Compare index and files both ways. Stop the store first, except for --read-only."""
    if repair and read_only:
        raise WrongUsage("--repair and --read-only: give one of them", field="--read-only")
    words = ["--repair"] if repair else ["--read-only"] if read_only else []
    _report(caller, "check", data_dir, words, "CANNOT_CHECK")


@command(app, "recover")
def recover(
    caller: Caller,
    data_dir: Annotated[Path | None, option("The store's data. Default: the data of the home.")] = None,
    namespace: Annotated[
        list[str] | None, option("A namespace that holds memories, if the journal is lost, too. Repeatable.")
    ] = None,
) -> None:
    """Rebuild a lost or damaged index, if the store refuses to start or reports INDEX_DAMAGED.

    It takes agents and versions from the journal, and reads and verifies the files of each memory. It names each
    version that cannot come back, and keeps the old index. Stop the store first.

    If the journal is lost, too, memories come back as agents named recovered-..., in the namespaces of --namespace."""
    words = [word for name in namespace or () for word in ("--namespace", name)]
    _report(caller, "recover", data_dir, words, "CANNOT_RECOVER")


def _report(caller: Caller, action: str, data_dir: Path | None, words: list[str], reason: str) -> None:
    """What the store's own program did to its data, in its words, and its exit code. Raises NotFound, and
    FailedPrecondition with this reason, where it did nothing."""
    check_installed("store")
    home = caller.home
    words = [action, "--data-dir", str(data_dir or home.store_data), *words, *(["--json"] if caller.as_json else [])]
    words += [*home.seal_options(), *home.sealed_options(data_dir), *_last_options(home, data_dir)]
    ended = done("cachestore_svc", words, lambda line: caller.say(line) if line.startswith("progress: ") else None)
    if not ended.out:
        if ended.code == NOT_FOUND:
            raise NotFound(ended.why, reason="NO_STORE", field="--data-dir" if data_dir else None)
        raise FailedPrecondition(ended.why, reason=reason)
    caller.result(ended.value if caller.as_json else None, ended.out.rstrip())
    raise typer.Exit(ended.code)


def _last_options(home: Home, data_dir: Path | None) -> list[str]:
    """Where the home's store last had its index, and the credentials of its bucket, if the environment names none. The
    bucket itself is noted in the data."""
    given, words = environment(StoreTable), list[str]()
    for name in ("catalog", "blob_credentials_file") if data_dir is None else ():
        option = name.replace("_", "-")
        if name not in given and (value := last_value(home, "store", option)):
            words += [f"--{option}", value]
    return words


@command(app, "scrub")
def scrub(
    caller: Caller,
    agent: Annotated[str, argument("Only this agent's blobs. Default: all blobs.", "AGENT")] = "",
    status: Annotated[bool, option("Only show the progress of the store's own scrub.", "--status")] = False,
) -> None:
    """Hash every stored blob again, at once; the store itself does so slowly, about once a week.

    It quarantines and names damaged blobs. The store fetches them from peers that have them; engines compute the rest
    again."""
    if status:
        _print_scrub(caller)
        return
    damaged: list[Digest] = []
    repaired: list[str] = []
    checked = 0
    with store_client(caller) as client, counting_progress(caller, "blobs") as on_progress:
        for report in client.verify_blobs(agent):
            checked = report.blobs_checked
            on_progress(report.blobs_checked, report.blobs_total)
            damaged += [Digest.from_proto(digest) for digest in report.damaged]
            repaired += [digest.hash for digest in report.repaired]
        left = len(damaged) - len(repaired)
        known = 0 if agent else max(0, client.get_stats().damaged_blob_count - left)
    hashes = [digest.hash for digest in damaged]
    value = {"blobs_checked": checked, "damaged": hashes, "repaired": repaired, "known_damaged": known}
    caller.result(value, lambda out: _show_scrub(out, checked, damaged, repaired, known))
    if left or known:
        raise typer.Exit(DAMAGED)


def _print_scrub(caller: Caller) -> None:
    with store_client(caller) as client:
        stats = client.get_stats()
    if not stats.HasField("scrub"):
        raise FailedPrecondition("the scrub of all namespaces is shown to administrators only", reason="ROLE_REQUIRED")
    row = scrub_row(stats.scrub)
    caller.result(row, scrub_text(row))


@command(app, "gc")
def gc(caller: Caller, dry_run: Annotated[bool, option("Report only.", "--dry-run")] = False) -> None:
    """Mark blobs that no version names, and remove blobs that were marked longer than the grace period ago."""
    with store_client(caller) as client:
        answer = client.collect_garbage(dry_run=dry_run)
    value = fields_of(answer, "blobs_marked", "blobs_swept", "bytes_freed") | {"is_dry_run": dry_run}
    freed = f"{size(answer.bytes_freed)} freed" + (" if it were not a dry run" if dry_run else "")
    text = f"{counted(answer.blobs_marked, 'blob')} marked, {answer.blobs_swept} swept, {freed}"
    caller.result(value, text)


@command(app, "stats")
def stats(caller: Caller) -> None:
    """Show sizes and counters."""
    with store_client(caller) as client:
        row = stats_row(client.get_stats())
    caller.result(row, pairs(_numbers(row)))


def _show_scrub(out: Console, checked: int, damaged: list[Digest], repaired: list[str], known: int) -> None:
    out.print(f"{counted(checked, 'blob')} checked, {len(damaged)} damaged")
    for digest in damaged:
        done = ", repaired from a peer" if digest.hash in repaired else ""
        out.print(f"  {digest.hash} ({size(digest.size_bytes)}){done}")
    if known:
        out.print(f"{counted(known, 'blob')} found damaged before and not stored again since")


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in row.items():
        if name not in ("counters", "scrub"):
            is_unlimited = name in ("quota_bytes", "write_budget_bytes") and not value
            yield name.replace("_", " "), "none" if is_unlimited else _shown(name, value)
    for name, value in row["counters"].items():
        yield f"{name.replace('_', ' ')} since start", _shown(name, value)


def _shown(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return size(value) if isinstance(value, int) and "bytes" in name.split("_") else str(value)
