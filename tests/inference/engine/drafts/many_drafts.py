"""`python -m tests.inference.engine.drafts.many_drafts`: many turns and tokens a side, with drafts and without.

Units are independent of one another, so several processes can do parts of them: `--shard 0/16` … `--shard 15/16`, and
`--merge` when they are done. A unit that was interrupted is done again from its beginning.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from inference_svc.engine.api import Hot, Tokens
from inference_svc.engine.engine import Engine
from inference_svc.engine.scheduling.schedulable import DraftRules
from inference_svc.formats.constraint import Constraint, ConstraintKind
from tests.inference.engine.drafts.planted_drafts import Told, planted, wrong_at
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.tiny_models import LLAMA, write_model

TOGETHER, TURNS = 12, 10_000
_LONGEST = 530  # tokens of a prompt: two blocks and some
REPLY, TOKENS, REPLIES = 8, 100_000, 60  # of a reply; on each side; replies of a unit
MOST_SURPRISE = 4.0  # standard deviations: of eight places none in 4,000 campaigns
DRAWN: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "max_tokens": REPLY}

WORDS = Constraint(ConstraintKind.REGEX, "([a-z]{1,5} ){3}end")
TAGS = Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}, "maxItems": 4}')
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 5, "logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.7, "logit_bias": ((50, 4.0), (60, -100.0))},
    {"repetition_penalty": 1.4, "repetition_tokens": 8, "logprobs": 0},
    {"constraint": WORDS, "logprobs": 1},
    {"constraint": TAGS, "temperature": 1.0, "seed": 3},
)
Unit = tuple[str, int]
UNITS: Sequence[Unit] = (
    *(("turns", number) for number in range(-(-TURNS // TOGETHER))),
    *(("draws", number) for number in range(-(-TOKENS // (REPLY * REPLIES)))),
)


class _Asked(NamedTuple):
    kept: int  # of the unit's text
    prompt: tuple[int, ...]
    how: dict[str, Any]


def turns(driver: Driver, told: type[Told], number: int) -> dict[str, Any]:
    """Turns together without drafts, then with: how many drafts were tried and right, and which turns differ.

    A turn has a prompt of 2 to 530 tokens and up to 24 of its reply. Prompts are beginnings of one text, which is
    computed once, with other ends: prompts of their own took two thirds of a unit's time.
    """
    rng, text = random.Random(number), tokens_of(_LONGEST, 1000 * number)
    text_key = driver.key()
    driver.turn(text, key=text_key, max_tokens=0)
    asked = [
        _Asked(
            kept := rng.randint(1, _LONGEST - 2),
            (*text[:kept], *tokens_of(rng.randint(1, 2), 1000 * number + 1 + each)),
            {**rng.choice(KINDS), "max_tokens": rng.randint(1, 24)},
        )
        for each in range(TOGETHER)
    ]
    plain_keys, keys = ([driver.fork(text_key) for _ in asked] for _ in range(2))
    plain = [
        driver.submit(each.prompt, Hot(each.kept), key=key, most_drafts=0, **each.how)
        for key, each in zip(plain_keys, asked, strict=True)
    ]
    told.replies = {each.prompt: driver.reply(turn.end()) for each, turn in zip(asked, plain, strict=True)}
    told.tries = staticmethod(wrong_at(rng.choice([2, 3, 5, 99])))
    tried = [
        driver.submit(each.prompt, Hot(each.kept), key=key, most_drafts=rng.randint(1, 16), **each.how)
        for key, each in zip(keys, asked, strict=True)
    ]
    ends = [each.end() for each in tried]
    differ = [
        f"turn {place}, {what}"
        for place in range(TOGETHER)
        for what, is_equal in (
            ("reply", reported(tried[place]) == reported(plain[place])),
            ("memory", driver.files(keys[place]) == driver.files(plain_keys[place])),
        )
        if not is_equal
    ]
    for key in (text_key, *plain_keys, *keys):
        driver.engine.memories.drop(key).result(60)
    drafted, right = sum(each.drafted_tokens for each in ends), sum(each.accepted_draft_tokens for each in ends)
    return {"turns": TOGETHER, "drafted": drafted, "right": right, "differ": differ}


def reported(listener: Listener) -> list[object]:
    tokens = [event for event in listener.events if isinstance(event, Tokens)]
    ended = listener.end()
    return [
        [token for event in tokens for token in event.ids],
        "".join(event.text for event in tokens),
        [event.logprobs for event in tokens if event.ids],
        (ended.finish_reason, ended.matched_stop, ended.completion_tokens, ended.text, ended.state),
    ]


def draws(driver: Driver, told: type[Told], number: int) -> dict[str, Any]:
    """Tokens drawn without drafts and with, by place in the reply. Other seeds on either side, so that equal draws
    cannot hide what drafts would change.
    """
    prompt = tokens_of(20, 4)
    told.replies = {prompt: driver.reply(driver.turn(prompt, most_drafts=0, seed=0, **DRAWN))}
    told.tries = staticmethod(lambda rest, _: rest)
    first = 1 + 2 * REPLIES * number
    plain, _ = _drawn(driver, prompt, range(first, first + REPLIES), most_drafts=0)
    ahead, right = _drawn(driver, prompt, range(first + REPLIES, first + 2 * REPLIES), most_drafts=REPLY)
    return {"plain": plain, "ahead": ahead, "right": right}


def _drawn(driver: Driver, prompt: Sequence[int], seeds: Sequence[int], **how: Any) -> tuple[list[Counter[int]], int]:
    counts: list[Counter[int]] = [Counter() for _ in range(REPLY)]
    right = 0
    for first in range(0, len(seeds), TOGETHER):
        now = [driver.submit(prompt, seed=seed, **DRAWN, **how) for seed in seeds[first : first + TOGETHER]]
        for each in now:
            right += each.end().accepted_draft_tokens
            for place, token in enumerate(driver.reply(each.end())):
                counts[place][token] += 1
    return counts, right


def surprises(found: Iterable[Mapping[str, Any]]) -> list[float]:
    """Of the draws of units: by place in the reply, how far both sides are apart (`surprise`)."""
    sides = {side: [Counter[int]() for _ in range(REPLY)] for side in ("plain", "ahead")}
    for unit in found:
        for side, places in sides.items():
            for place, counts in enumerate(unit[side]):
                places[place].update({int(token): count for token, count in counts.items()})
    return [surprise(plain, ahead) for plain, ahead in zip(sides["plain"], sides["ahead"], strict=True)]


def surprise(one: Counter[int], other: Counter[int]) -> float:
    """Standard deviations above the mean of chi squared, by which two samples differ; rare tokens count as one."""
    common = [token for token in one | other if one[token] + other[token] >= 10]
    columns = [(one[token], other[token]) for token in common]
    columns.append((one.total() - sum(a for a, _ in columns), other.total() - sum(b for _, b in columns)))
    shares = [each.total() / (one.total() + other.total()) for each in (one, other)]
    found = sum(
        (seen - share * (a + b)) ** 2 / (share * (a + b))
        for a, b in columns
        if a + b
        for seen, share in zip((a, b), shares, strict=True)
    )
    free = max(1, sum(a + b > 0 for a, b in columns) - 1)
    # Wilson and Hilferty, 1931: the cube root is nearly normal.
    return float(((found / free) ** (1 / 3) - (1 - 2 / (9 * free))) / (2 / (9 * free)) ** 0.5)


@contextmanager
def _driver() -> Iterator[Driver]:
    with tempfile.TemporaryDirectory() as root:
        model = write_model(Path(root, "model"), {**LLAMA, "eos_token_id": 0})
        engine = Engine.open(
            model,
            cache_dir=Path(root, "digests"),
            memory_budget_bytes=256 << 20,
            longest_gap_s=0,
            batch_invariant=mx.default_device().type != mx.DeviceType.cpu,
            drafts=DraftRules(most=16),
        )
        try:
            yield Driver(engine)
        finally:
            engine.close()


def done(directory: Path) -> dict[Unit, dict[str, Any]]:
    """What units found, whichever shard did them."""
    found: dict[Unit, dict[str, Any]] = {}
    for path in sorted(directory.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                unit = json.loads(line)
            except ValueError:
                continue  # the process died while it wrote it: that unit is done again
            found[unit["kind"], unit["number"]] = unit
    return found


def do(mine: Iterable[Unit], file: Path, time_limit_s: float) -> None:
    """Do the units that are not done; each is kept as a line of the file."""
    found_before = done(file.parent)
    waiting = [unit for unit in mine if unit not in found_before]
    ends_s = time.monotonic() + time_limit_s
    with _driver() as driver, planted() as told, file.open("a") as kept:
        for kind, number in waiting:
            if time.monotonic() > ends_s:
                return
            found = {"turns": turns, "draws": draws}[kind](driver, told, number)
            print(json.dumps({"kind": kind, "number": number, **found}), file=kept, flush=True)


def report(found: Mapping[Unit, Mapping[str, Any]]) -> int:
    """Print what all units found together; the exit code."""
    groups = [found[unit] for unit in UNITS if unit[0] == "turns" and unit in found]
    drawn = [found[unit] for unit in UNITS if unit[0] == "draws" and unit in found]
    differ = [f"group {each['number']}: {what}" for each in groups for what in each["differ"]]
    count, drafted, right = (sum(each[name] for each in groups) for name in ("turns", "drafted", "right"))
    print(f"{count} turns with drafts, {right} of {drafted} right: {len(differ)} differences from turns without")
    print(*differ[:50], sep="\n", end="\n" if differ else "")
    apart = surprises(drawn) if drawn else []
    print(f"{len(drawn) * REPLIES * REPLY} tokens a side, {sum(each['right'] for each in drawn)} drafts right")
    print(f"chi squared by place, in standard deviations: {', '.join(f'{each:.2f}' for each in apart)}")
    missing = len(UNITS) - len(groups) - len(drawn)
    is_kept = not differ and not missing and max(apart, default=MOST_SURPRISE) < MOST_SURPRISE
    print(f"{missing} of {len(UNITS)} units are missing" if missing else "kept" if is_kept else "NOT KEPT")
    return 0 if is_kept else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.inference.engine.drafts.many_drafts",
        description=__doc__,
        epilog="Ends with 0 if all is done and equal, with 1 if something differs or is missing.",
    )
    parser.add_argument("--out", type=Path, default=Path("out/drafts"), help="one file a shard (default %(default)s)")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="do every Nth unit, from the Ith on")
    parser.add_argument("--time-limit-s", type=float, default=7200, help="no further unit begins after it")
    parser.add_argument("--cpu", action="store_true", help="compute on the CPU of a machine that has a GPU")
    parser.add_argument("--merge", action="store_true", help="only report what all shards have done")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.merge:
        return report(done(given.out))
    if given.cpu:
        mx.set_default_device(mx.cpu)
    index, _, count = given.shard.partition("/")
    mine = UNITS[int(index) :: int(count)]
    do(mine, given.out / f"{index}-of-{count}.jsonl", given.time_limit_s)
    found = done(given.out)
    left = [unit for unit in mine if unit not in found]
    print(f"shard {given.shard}: {len(left)} of {len(mine)} units are left")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
