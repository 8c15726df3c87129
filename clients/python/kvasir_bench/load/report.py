"""The results of `kvasir bench load` for people: tables and pictures, with mlx_lm.server's beside them."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvasir_bench.pictures import Picture, Plots
from kvasir_bench.tables import cells, number, text_table

KEYS = """Names in the JSON stay. `settings` are the options. `phases` are the turns that arrived in the ramp and in the
steady state, and the seconds from its end until all had ended (`tail_s`); with --requests the whole run is steady.
`first_token_s` and `end_to_end_s`, counted from the moment that a turn was due, are those of turns that arrived in the
steady state; `gap_s`, between two messages of a turn, `tokens_per_s` and `requests_per_s` are those of the steady
state, whoever's. Each of the first three has `count`, `mean`, `p50`, `p95`, `p99`, `largest`. `wall_s`: until all had
ended. `reply_tokens`: of all turns. Goodput is `good_requests_per_s`: turns that ended well with their first token
within --first-token-ms and every gap within --gap-ms; `good_share` is their part of the turns that ended.
`offered_tokens_per_s` is what the arrivals of the steady state requested while they came; with `settings.at_once` turns
arrive when others end, and nothing is offered. `in_flight_at_start` and `in_flight_at_end` of the steady state: an
engine that falls behind has more at its end. `failures` by reason, of HTTP by status. `tokens_counted_by`: of how many
turns tokens were counted by their ids, by usage, or by events: where a server gives no usage, each event counts one.
Prompts are as long as the server counts; where it does not (`prompt_tokens_are_guessed`), they are guessed.
`load_before` and `load_after`: the machine's. `peer` has the same names of mlx_lm.server, and how it `serves`, or why
it was `left_out`; `ratios` are ours / its, `reply_tokens` among them, because replies that end sooner are less work;
none where turns of either failed."""

_TIMES = (("first_token_s", "first token"), ("gap_s", "gap"), ("end_to_end_s", "end to end"))
_COLUMNS = ("mean", "p50", "p95", "p99", "largest")
_RATES = ("requests_per_s", "good_requests_per_s", "tokens_per_s")


def ratios(ours: Mapping[str, Any], peers: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Ours / the peer's, of each name that both have found; None if either did not answer every turn."""
    if "left_out" in peers or ours["failures"] or peers["failures"]:
        return None
    pairs = {name: (ours[name], peers[name]) for name in ("wall_s", "reply_tokens", *_RATES)}
    pairs |= {
        f"{name.removesuffix('_s')}_{rank}": (ours[name][rank], peers[name][rank])
        for name, _ in _TIMES
        for rank in ("p50", "p99")
    }
    return {name: one / other if one is not None and other else None for name, (one, other) in pairs.items()}


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    servers, peer = _servers(results), results.get("peer")
    yield f"{_arriving(results['settings'])}\n"
    yield from text_table(cells([_rates(name, found) for name, found in servers.items()]))
    yield ""
    yield from text_table(
        cells([_times(title, name, found[key]) for key, title in _TIMES for name, found in servers.items()])
    )
    for name, found in servers.items():
        if found["tokens_counted_by"].get("events"):
            yield f"{name}: no usage in {found['tokens_counted_by']['events']} turns: an event counts one token"
        yield from (f"{name} failed: {count} ({reason})" for reason, count in found["failures"].items())
    if results["prompt_tokens_are_guessed"]:
        yield "the server does not count prompts: their length is a guess"
    if peer and "left_out" in peer:
        yield f"{peer['name']} was left out: {peer['left_out']}"
    elif peer:
        yield f"{peer['name']} serves {peer['serves']}"
        compared = results["ratios"] or {}
        shown = (f"{name.replace('_', ' ')} {number(ratio)}" for name, ratio in compared.items() if ratio)
        yield f"{results['name']} / {peer['name']}: {', '.join(shown) or 'not compared, because turns failed'}"


def plots(results: Mapping[str, Any]) -> Plots:
    servers = _servers(results)
    rates = [(key.removesuffix("_per_s").replace("_", " "), key) for key in _RATES[:2] if results[key] is not None]
    bars = [{"of": title} | {name: found[key] for name, found in servers.items()} for title, key in rates]
    drawn = {"load_requests": (Picture("Requests a second", "of", tuple(servers)), bars)}
    for key, title in _TIMES:
        bars = [{"of": rank} | {name: found[key][rank] for name, found in servers.items()} for rank in _COLUMNS]
        drawn[f"load_{key.removesuffix('_s')}"] = (Picture(f"Seconds: {title}", "of", tuple(servers)), bars)
    return Plots(_arriving(results["settings"]), drawn)


def _servers(results: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    peer = results.get("peer") or {"left_out": ""}
    return {results["name"]: results} | ({} if "left_out" in peer else {peer["name"]: peer})


def _arriving(settings: Mapping[str, Any]) -> str:
    who = f"{settings['at_once']} at once" if settings["at_once"] else f"{settings['rate_per_s']:.3g} a second"
    long = f"{settings['requests']:,} turns" if settings["requests"] else f"turns for {settings['seconds']:.0f} s"
    prefix = f" behind {settings['shared_prefix']} that all share" if settings["shared_prefix"] else ""
    agents = f", agents of {settings['turns']} turns" if settings["turns"] > 1 else ""
    return (
        f"{long}, {who}{agents}: prompts of about {settings['prompt_tokens']} tokens{prefix}, "
        f"replies of up to {settings['reply_tokens']}, seed {settings['seed']}"
    )


def _rates(name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    shown = ("offered_tokens_per_s", "reply_tokens", "in_flight_at_start", "in_flight_at_end")
    return {
        "server": name,
        "wall_s": found["wall_s"],
        **{key: found[key] for key in (*_RATES, *shown)},
        "failed": sum(found["failures"].values()),
    }


def _times(title: str, name: str, found: Mapping[str, Any]) -> dict[str, Any]:
    return {"": title, "server": name, "count": found["count"], **{f"{key}_s": found[key] for key in _COLUMNS}}
