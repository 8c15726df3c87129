"""The table of a measurement and its claims, from what was played. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvasir_bench.arithmetic import percentile, wilson
from kvasir_bench.scenarios.accounting import AGES, Batch, Playthrough

KV, PREFILL, KILLED, MOVED = "kv", "prefill", "killed", "moved"
DEPTHS: Mapping[str, int | None] = {"bm25-1": 1, "bm25-2": 2, "bm25-4": 4, "bm25-8": 8, "bm25-all": None}
WAYS = (KV, PREFILL, *DEPTHS, KILLED, MOVED)
ALL = "all"
_WANTED_SHARE = 0.15
_DILEMMA = "prisoners-dilemma"


def rows(played: Sequence[Playthrough], batches: Sequence[Batch]) -> list[dict[str, Any]]:
    scenarios = list(dict.fromkeys(each.scenario for each in played))
    found = []
    for scenario in (*scenarios, ALL):
        full = _computed(played, scenario, PREFILL)
        for way in (way for way in WAYS if any(each.way == way for each in played)):
            of_way = _of(played, scenario, way)
            its_batches = [each for each in batches if each.way == way and scenario in (each.scenario, ALL)]
            found.append({"scenario": scenario, "way": way, **_row(of_way, its_batches, full)})
    return found


def _row(played: Sequence[Playthrough], batches: Sequence[Batch], full: int) -> dict[str, Any]:
    first_tokens = [seconds for each in played for seconds in each.first_token_s]
    computed = sum(each.prefilled_tokens for each in played)
    conversations = max(1, sum(each.conversations for each in batches))
    words = {(each.scenario, *sorted(each.said.items())) for each in played}
    unknown = [check.is_met for each in played for check in each.checked if check.age is None]
    return {
        **_accuracy(check.is_met for each in played for check in each.checked if check.age is not None),
        "conversations": len(played),
        "distinct": len(words),  # of those: in what was said
        "unknown_right": sum(unknown),
        "unknown": len(unknown),
        "leaks": sum(len(each.leaks) for each in played),
        "prefilled_tokens": computed,
        "share_of_prefill": computed / full if full else None,
        "first_token_p50_s": percentile(first_tokens, 50) if first_tokens else None,
        "first_token_p95_s": percentile(first_tokens, 95) if first_tokens else None,
        "wall_s": sum(each.wall_s for each in batches),
        "hot_bytes": round(sum(each.hot_bytes for each in batches) / conversations),
        "stored_bytes": round(sum(each.stored_bytes for each in batches) / conversations),
    }


def ages(played: Sequence[Playthrough]) -> list[dict[str, Any]]:
    found = []
    for way in (way for way in WAYS if any(each.way == way for each in played)):
        for age, turns in AGES.items():
            checked = [check for each in _of(played, ALL, way) for check in each.checked]
            row = _accuracy(check.is_met for check in checked if check.age is not None and check.age in turns)
            if row["facts"]:
                found.append({"way": way, "age": age, **row})
    return found


def claims(played: Sequence[Playthrough]) -> list[dict[str, Any]]:
    """Claims about the ways that were played beside kv: what, is_met, found, and is_exact: no chance is in it."""
    ways = {each.way for each in played}
    ways = ways if KV in ways else set()
    kv = _row(_of(played, ALL, KV), (), 0)
    span = f"{kv['accuracy']:.3f} [{kv['low']:.3f}, {kv['high']:.3f}]"
    made = []
    for way in (way for way in WAYS if way in ways and way not in (KV, KILLED, MOVED)):
        other = _row(_of(played, ALL, way), (), 0)["accuracy"]
        if way == PREFILL:
            text, is_met = "kv is as accurate as prefill (within its interval)", kv["low"] <= other <= kv["high"]
        elif DEPTHS[way] is not None:
            text, is_met = f"kv is more accurate than {way} (which lies below its interval)", other < kv["low"]
        else:
            continue
        made.append(_claim(text, is_met, f"{span} and {other:.3f}", is_exact=False))
    for way in (way for way in (KILLED, MOVED) if way in ways):
        different = _different(played, way)
        text = f"{way} says what kv says, word for word and in as many tokens"
        made.append(_claim(text, not different, f"{different} turns differ"))
    leaked = sum(len(each.leaks) for each in played)
    made.append(_claim("no agent says what it was never shown", not leaked, f"{leaked} leaks"))
    if PREFILL in ways:
        mine, full = _computed(played, ALL, KV), _computed(played, ALL, PREFILL)
        made.append(_claim("kv prefills fewer tokens than prefill", mine < full, _share(mine, full)))
    return made


def wanted(played: Sequence[Playthrough]) -> dict[str, Any] | None:
    """The goal of 15 % over the prisoner's dilemma: told, and not among the claims."""
    mine, full = _computed(played, _DILEMMA, KV), _computed(played, _DILEMMA, PREFILL)
    if not full:
        return None
    text = f"kv prefills at most {_WANTED_SHARE:.0%} of prefill's tokens over {_DILEMMA}"
    return {"what": text, "is_met": mine <= _WANTED_SHARE * full, "found": _share(mine, full)}


def _different(played: Sequence[Playthrough], way: str) -> int:
    """Turns with another reply than under kv, or with none."""
    before = {(each.scenario, each.variant): each.said for each in _of(played, ALL, KV)}
    return sum(
        each.said.get(turn) != before[each.scenario, each.variant].get(turn)
        for each in _of(played, ALL, way)
        for turn in {*each.said, *before[each.scenario, each.variant]}
    )


def _of(played: Sequence[Playthrough], scenario: str, way: str) -> list[Playthrough]:
    return [each for each in played if each.way == way and scenario in (each.scenario, ALL)]


def _computed(played: Sequence[Playthrough], scenario: str, way: str) -> int:
    return sum(each.prefilled_tokens for each in _of(played, scenario, way))


def _accuracy(answers: Iterable[bool]) -> dict[str, Any]:
    are_met = list(answers)
    low, high = wilson(sum(are_met), len(are_met))
    share = sum(are_met) / len(are_met) if are_met else 0.0
    return {"right": sum(are_met), "facts": len(are_met), "accuracy": share, "low": low, "high": high}


def _claim(text: str, is_met: bool, found: str, *, is_exact: bool = True) -> dict[str, Any]:
    return {"what": text, "is_met": is_met, "found": found, "is_exact": is_exact}


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,}, {part / max(1, whole):.1%}"
