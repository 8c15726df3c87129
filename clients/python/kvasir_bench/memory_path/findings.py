"""What the turns of `kvasir bench memory-path` come to: medians by length, ratios, and the targets."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvasir_bench.arithmetic import Target, median
from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.tables import cells, text_table, verdicts

RESTORED = ("from_ram", "engine_killed", "both_killed")
# By length, the most that a first token after a kill may take of one that is computed.
_MOST_OF_COLD = {8192: 0.3, 32768: 0.15}
_MOST_OF_COLD_EVER = 1.05
_LEAST_OF_DISK_AND_HASH = 0.8
_MOST_LAG_S = 0.03
_MOST_COLD_LAG_S = 0.3
_COLD_LAG_TOKENS = 32_768
_MOST_FIRST_TO_THIRD = 1.5
_PICTURES = {
    "first_token": Picture(
        "Seconds to the first token",
        "length",
        ("cold_s", "hot_s", "from_ram_s", "engine_killed_s", "both_killed_s"),
        is_log=True,
    ),
    "publishing": Picture(
        "Bytes per second from the last token until stored", "length", ("publish_per_s", "limit_per_s"), is_log=True
    ),
}
KEYS = """Names in the JSON stay. `agents` has each agent's turns as their caller saw them: `cold`, three `short` ones,
`hot`, and the same question `from_ram` (the model was loaded again, the store's files are in the page cache),
`engine_killed` (kill -9) and `both_killed` (the page cache was dropped before they started again, when the store reads
ahead; `ready.both_killed.cached_share` is the share that the system kept); `is_exact`: the reply is that of the hot
agent, token for token. `stored_s` counts from the request, None: never. `rows` are medians by length; `publish_per_s`
counts from the last token until the store has the memory, `whole_per_s` from the request. `machine` and `device` are
bytes per second; `read_dropped` is without the page cache, and `both_killed_of_disk` is the first token's time in units
of that of reading the memory so. The slower of reading and BLAKE3 bounds a restore: `limit_of_cold` is what it takes
alone, as a share of cold, and `engine_killed_of_limit` and `both_killed_of_limit` are first tokens in its units, each
with its page cache."""


def complete(results: dict[str, Any]) -> dict[str, Any]:
    """The results with `rows` and `targets`; in place."""
    results["rows"] = list(_rows(results))
    results["targets"] = [target.row() for target in _targets(results)]
    return results


def _rows(results: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    limit = min(results["machine"]["write_synced"], results["machine"]["blake3_all"])
    per_token = results["model"]["kv_bytes_per_token"]
    for length in dict.fromkeys(agent["length"] for agent in results["agents"]):
        agents = [agent for agent in results["agents"] if agent["length"] == length]
        tokens = [agent["cold"]["prompt_tokens"] + agent["cold"]["tokens"] for agent in agents]
        sizes = [per_token * count for count in tokens]
        cold = median(agent["cold"]["first_token_s"] for agent in agents)
        row = {
            "length": length,
            "agents": len(agents),
            "memory_bytes": median(sizes),
            "cold_s": cold,
            "prefill_s": median(agent["cold"]["prefill_s"] for agent in agents),
            "hot_s": median(agent["hot"]["first_token_s"] for agent in agents),
        }
        for phase in RESTORED:
            found = [agent[phase] for agent in agents if phase in agent]
            row[f"{phase}_s"] = seconds = median(turn["first_token_s"] for turn in found)
            row[f"{phase}_of_cold"] = seconds / cold if seconds and cold else None
            row[f"{phase}_cached"] = median(turn["cached_tokens"] / turn["prompt_tokens"] for turn in found)
        row |= _beside_disk(row, results["machine"])
        publish, whole = list(_rates(agents, sizes, "last_token_s")), list(_rates(agents, sizes, ""))
        row["publish_per_s"], row["whole_per_s"], row["limit_per_s"] = median(publish), median(whole), limit
        row["short_lag_s"] = median(turn["lag_s"] for agent in agents for turn in agent["short"])
        row["cold_lag_s"] = median(agent["cold"]["lag_s"] for agent in agents)
        row["not_stored"] = sum(each["stored_s"] is None for agent in agents for each in (agent, *agent["short"]))
        turns = (turn for agent in agents for turn in (agent["cold"], *agent["short"]))
        row["failed_at_first"] = sum(turn["snapshot"] == "failed" for turn in turns)
        row["is_exact"] = all(agent[phase]["is_exact"] for agent in agents for phase in RESTORED if phase in agent)
        yield row


def _beside_disk(row: Mapping[str, Any], machine: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Restores in units of what the disk, and the slower of disk and hash, take for the memory alone."""
    for phase, disk in (("engine_killed", "read_cached"), ("both_killed", "read_dropped")):
        if (seconds := row[f"{phase}_s"]) and (rate := machine.get(disk)):
            limit_s = row["memory_bytes"] / min(rate, machine["blake3_all"])
            yield f"{phase}_of_limit", seconds / limit_s
            if phase == "both_killed":
                yield "both_killed_of_disk", seconds * rate / row["memory_bytes"]
                yield "limit_of_cold", limit_s / row["cold_s"]


def _rates(agents: Sequence[Mapping[str, Any]], sizes: Sequence[int], since: str) -> Iterator[float]:
    """Bytes per second of cold turns, since a moment of the turn or its request."""
    for agent, size in zip(agents, sizes, strict=True):
        if (stored := agent["stored_s"]) is not None:
            yield size / max(1e-3, stored - (agent["cold"][since] if since else 0.0))


def _targets(results: Mapping[str, Any]) -> Iterator[Target]:
    rows = {row["length"]: row for row in results["rows"]}
    for length, row in rows.items():
        # A played model's prompt costs a configured time.
        for phase in () if results["model"]["is_played"] else RESTORED:
            words, found = phase.replace("_", " "), row[f"{phase}_of_cold"]
            most = _MOST_OF_COLD.get(length, _MOST_OF_COLD_EVER)
            yield Target(f"first token {words} / cold, {length:,} tokens", found, most, is_most=True)
        share = row["publish_per_s"] / row["limit_per_s"] if row["publish_per_s"] else None
        what = f"publishing / min(synced writes, BLAKE3), {length:,} tokens"
        yield Target(what, share, _LEAST_OF_DISK_AND_HASH)
        what = f"the last event behind the last of 50 tokens, s, {length:,} tokens"
        yield Target(what, row["short_lag_s"], _MOST_LAG_S, is_most=True)
        if length == _COLD_LAG_TOKENS:
            yield Target(
                f"the same behind a cold turn of {length:,} tokens", row["cold_lag_s"], _MOST_COLD_LAG_S, is_most=True
            )
        yield Target(f"memories that were never stored, {length:,} tokens", row["not_stored"], 0, is_most=True)
        yield Target(
            f"replies that differ from the hot agent's, {length:,} tokens", int(not row["is_exact"]), 0, is_most=True
        )
    first, *_, third = results["first_turns"]
    yield Target("a process's first turn / its third", first / third, _MOST_FIRST_TO_THIRD, is_most=True)


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    model, ready = results["model"], results["ready"]
    yield (
        f"{model['name']} on {model['device']}, {model['kv_bytes_per_token']:,} bytes a token, {model['kv_policy']}; "
        f"{results['settings']['repeats']} repeats, {results.get('elapsed_s', 0):.0f} s"
    )
    rates = {**results["machine"], **results["device"]}
    yield ", ".join(f"{name.replace('_', ' ')} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    starts = (f"{name.replace('_', ' ')}: " + ", ".join(_facts(facts)) for name, facts in ready.items())
    yield "; ".join(starts)
    yield "first turns: " + ", ".join(f"{1000 * seconds:,.0f} ms" for seconds in results["first_turns"])
    yield ""
    times = ("cold_s", "prefill_s", "hot_s", *(f"{phase}_s" for phase in RESTORED), *(f"{p}_of_cold" for p in RESTORED))
    beside_disk = ("limit_of_cold", "engine_killed_of_limit", "both_killed_of_limit")
    shown = ("length", "memory_bytes", *times, *beside_disk)
    yield from text_table(cells([{key: row.get(key) for key in shown} for row in results["rows"]]))
    yield ""
    kept = ("publish_per_s", "whole_per_s", "limit_per_s")
    others = ("short_lag_s", "cold_lag_s", "not_stored", "failed_at_first", "is_exact")
    yield from text_table(
        cells(
            [
                {"length": row["length"]}
                | {f"{key.removesuffix('_per_s')}_mb_per_s": row[key] and row[key] / 1e6 for key in kept}
                | {key: row[key] for key in others}
                for row in results["rows"]
            ]
        )
    )
    yield ""
    yield from text_table(verdicts(results["targets"]))


def _facts(facts: Mapping[str, Any]) -> Iterator[str]:
    return (f"{key.removesuffix('_s').replace('_', ' ')} {value:.3g}" for key, value in facts.items())


def plots(results: Mapping[str, Any]) -> Plots:
    note = f"{results['model']['name']} on {results['model']['device']}"
    return Plots(note, {f"memory_path_{name}": (each, results["rows"]) for name, each in _PICTURES.items()})
