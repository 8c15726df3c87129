"""`kvasir stats` and `kvasir models …`: the engine's counters, and its models."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvasir.cli import failures, hub
from kvasir.cli.caller import Caller, command, completing
from kvasir.cli.rows import fields_of, size
from kvasir.cli.showing.arguments import argument, option
from kvasir.cli.showing.tables import pairs, table
from kvasir.clients import InferenceClient
from kvasir.errors import KvasirError
from kvasir.inference.v1 import inference_pb2 as pb
from kvasir.waits import SOON_S

models = typer.Typer(help="Fetch, list, load and remove models.", no_args_is_help=True)
_DropOption = Annotated[bool, option("Continue even if hot memories cannot be stored and are lost.", "--drop-unstored")]


def complete_model(context: typer.Context, incomplete: str) -> list[str]:
    """Names of the engine's models that begin so, for the shell; none when the engine does not list them soon."""
    with suppress(KvasirError, ValueError, OSError), completing(context).engine.engine_client(SOON_S) as client:
        return [model.name for model in client.list_models() if model.name.startswith(incomplete)]
    return []


@contextmanager
def engine_client(caller: Caller) -> Iterator[InferenceClient]:
    """A client of the caller's engine. An error names the address that does not answer."""
    with caller.engine.engine_client() as client, failures.naming("engine", caller):
        yield client


def stats(caller: Caller) -> None:
    """Show the engine's counters since its start, and its state: turns, tokens, hits, misses by reason, memory.

    --json: model, uptime_s, namespaces (a list: namespace, turns, turn_ends, refusals, prefilled_tokens, cached_tokens,
    decoded_tokens, sources, misses, publications, made_good, published_bytes, owed_memories, owed_bytes, waiting_turns,
    running_turns, kv_memory_used_bytes) and engine (admins only)."""
    with engine_client(caller) as client:
        row = stats_row(client.get_stats())
    caller.result(row, lambda out: _show_stats(out, row))


command(models, "pull")(hub.pull)
command(models, "rm")(hub.rm)


@command(models, "ls")
def list_models(
    caller: Caller,
    fetched: Annotated[bool, option("Models on this machine, running or not.", "--fetched")] = False,
) -> None:
    """List the models of the engine's configuration, or with --fetched those of `kvasir models pull`."""
    if fetched:
        rows = hub.fetched(caller)
        return caller.result(rows, pairs((row["name"], size(row["size_bytes"])) for row in rows))
    with engine_client(caller) as client:
        rows = [model_row(model) for model in client.list_models()]
    return caller.result(rows, _models_table(rows))


@command(models, "load")
def load_model(
    caller: Caller,
    name: Annotated[str, argument("A name of `kvasir models ls`.", "NAME", autocompletion=complete_model)],
    drop_unstored: _DropOption = False,
) -> None:
    """Load a model. The engine first stores the hot memories of the previous model and unloads it."""
    with caller.busy(f"loading {name}"), engine_client(caller) as client:
        answer = client.load_model(name, drop_unstored=drop_unstored)
    value = {"loaded": answer.model.name, **_left(answer.left)}
    caller.result(value, f"{name} is loaded; {_left_in_words(answer.left)}")


@command(models, "unload")
def unload_model(
    caller: Caller,
    name: Annotated[str, argument("Default: the loaded model.", "NAME", autocompletion=complete_model)] = "",
    drop_unstored: _DropOption = False,
) -> None:
    """Let turns end, store hot memories, and free the model."""
    with caller.busy("unloading"), engine_client(caller) as client:
        left = client.unload_model(name, drop_unstored=drop_unstored).left
    caller.result(_left(left), f"unloaded; {_left_in_words(left)}")


def stats_row(answer: pb.GetStatsResponse) -> dict[str, Any]:
    """The answer as plain values."""
    row: dict[str, Any] = {
        "model": answer.model,
        "uptime_s": answer.uptime.ToTimedelta().total_seconds(),
        "namespaces": [_fields(namespace) for namespace in answer.namespaces],
    }
    if answer.HasField("engine"):
        row["engine"] = _fields(answer.engine)
    return row


def model_row(model: pb.Model) -> dict[str, Any]:
    """A model's facts; only its name if it is not loaded."""
    is_loaded = model.state in (pb.MODEL_STATE_LOADED, pb.MODEL_STATE_RETIRING)
    row: dict[str, Any] = {"name": model.name, "is_loaded": is_loaded}
    if is_loaded:
        row |= fields_of(model, "context_tokens", "kv_bytes_per_token", "kv_policy", "compute_type")
    return row


def _fields(message: pb.NamespaceStats | pb.EngineStats) -> dict[str, Any]:
    values = fields_of(message, *(field.name for field in message.DESCRIPTOR.fields))
    return {name: dict(sorted(value.items())) if hasattr(value, "items") else value for name, value in values.items()}


def _left(left: pb.MemoriesLeft) -> dict[str, int]:
    return {"stored": left.stored, "dropped": left.dropped}


def _left_in_words(left: pb.MemoriesLeft) -> str:
    if not left.stored and not left.dropped:
        return "no memory was hot"
    return f"hot memories stored: {left.stored}" + (f", lost: {left.dropped}" if left.dropped else "")


def _show_stats(out: Console, row: dict[str, Any]) -> None:
    out.print(f"model: {row['model'] or 'none is loaded'}; up for {row['uptime_s']:.0f} s")
    if engine := row.get("engine"):
        out.print(pairs(_counts(engine)))
    for namespace in row["namespaces"]:
        out.print(f"\nnamespace {namespace['namespace']}")
        out.print(pairs(_counts({name: value for name, value in namespace.items() if name != "namespace"})))


def _counts(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Numbers by their names; those of several words with each word."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _counts({f"{name}: {word}": count for word, count in value.items()})
        else:
            yield name.replace("_", " "), size(value) if name.endswith("_bytes") else str(value)


def _models_table(rows: list[dict[str, Any]]) -> Table:
    def cells(row: dict[str, Any]) -> tuple[object, ...]:
        if not row["is_loaded"]:
            return (row["name"],)
        kv = (size(row["kv_bytes_per_token"]), row["kv_policy"])
        return row["name"], "loaded", row["context_tokens"], *kv, row["compute_type"]

    columns = ("model", "", "context", "KV per token", "KV policy", "computes in")
    return table(columns, map(cells, rows), numbers=("context", "KV per token"))
