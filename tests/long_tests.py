"""Which long tests take their turn at a commit, and which tests of a promise no commit goes without."""

import os
from collections.abc import Collection, Iterable, Mapping

import pytest

PARTS = 120
# Whoever takes longer has no turn, as a commit would wait for it alone: it runs where all do (`make test-whole`).
LONGEST_TURN_S = 45
# As many seconds of a file take their turn together, for what they share; all of a file could be two parts.
_TOGETHER_S = 40

# Of each promise the quickest tests that show it: they run at every commit, however long they take.
PROMISES: Mapping[str, tuple[str, ...]] = {
    "kill -9 loses nothing that was acknowledged": (
        "tests/cachestore/service/test_kills.py::test_eight_kills_under_load_lose_nothing_acknowledged",
        "tests/inference/service/memories/test_memory_survives.py::test_after_a_kill_of_both_services_the_agent_goes_on_token_for_token",
    ),
    "a memory is stored and goes on, however large": (
        "tests/campaigns/sizes/test_sizes.py::test_a_store_that_is_killed_in_the_middle_loses_no_memory",
    ),
    "no namespace sees another's": (
        "tests/cachestore/any_backend/test_store_isolation.py::test_what_is_theirs_does_not_exist_for_us",
        "tests/inference/engine/turns/test_batching.py::test_nobody_begins_with_what_another_namespace_holds",
        "tests/gateway/memory/test_memory_over_http.py::test_a_system_prompts_blocks_are_shared_under_one_namespace_alone",
    ),
    "restored as if it had never left": (
        "tests/inference/engine/restoring/test_restore.py::test_a_restored_sequence_goes_on_as_if_it_had_never_left",
    ),
    "in a batch as alone": (
        "tests/inference/engine/turns/test_batching.py::test_eight_agents_say_and_remember_together_what_each_does_alone",
        "tests/inference/kv/test_backends.py::test_a_concurrent_merge_mixes_no_rows",
    ),
    "a cancelled turn leaves the memory of the turn before": (
        "tests/inference/engine/turns/test_turns.py::test_a_cancelled_turn_leaves_the_memory_of_the_turn_before",
    ),
    "a store that fails costs time and no token": (
        "tests/inference/service/stores/test_warming.py::test_a_failed_restore_poisons_nothing_later",
    ),
    "what is damaged is found, named and never served": (
        "tests/cachestore/core/survival/test_store_survives_flips.py::test_300_bit_flips_are_each_found_named_and_never_served",
        "tests/inference/service/stores/test_store_files.py::test_a_flipped_bit_is_found_and_the_store_quarantines_the_blob",
    ),
    "nobody calls without a right": (
        "tests/cachestore/service/access/test_who_may_call.py::test_a_foreign_credential_learns_and_changes_nothing",
        "tests/cachestore/service/access/test_who_may_call.py::test_no_credential_or_a_wrong_one_is_unauthenticated",
    ),
    "no text of a prompt is logged": (
        "tests/cachestore/service/access/test_listening.py::test_neither_text_nor_tokens_are_logged",
        "tests/inference/service/test_bad_input.py::test_no_word_of_any_prompt_is_logged",
    ),
    "an agent has one owner": (
        "tests/cachestore/moving/test_ownership.py::test_moves_in_any_order_leave_one_owner_at_most_and_in_the_end_exactly_one",
    ),
    "nobody hears that a turn moved": (
        "tests/inference/handover/test_moved_turns.py::test_a_stop_string_is_found_across_the_move_and_not_told",
    ),
}


def part_of(turn: str) -> int:
    """The part, from 0, whose turn it is: of a part's number or of a commit's name, both hexadecimal."""
    try:
        return int(turn, 16) % PARTS
    except ValueError:
        raise pytest.UsageError(f"KVASIR_TURN is {turn!r}: expected a number or a commit") from None


def parts(seconds: Iterable[tuple[str, float]]) -> dict[str, int]:
    """The part of each file, or section of one: all parts take about as long.

    `seconds`: of each long test its file or section, and how long it takes.
    """
    files: dict[str, float] = {}
    for file, each in seconds:
        files[file] = files.get(file, 0) + each
    filled, part = [0.0] * PARTS, {}
    for file in sorted(files, key=lambda file: (-files[file], file)):
        part[file] = filled.index(min(filled))
        filled[part[file]] += files[file]
    return part


def whose_turn_it_is(tests: Mapping[str, tuple[str, float]], part: int) -> Collection[str]:
    """Names of the long tests of a part. `tests`: of each its file, and how long it takes."""
    before: dict[str, float] = {}  # seconds of each file
    sections: dict[str, tuple[str, float]] = {}
    for name, (file, seconds) in sorted(tests.items()):
        if seconds <= LONGEST_TURN_S:
            sections[name] = f"{file} {before.get(file, 0) // _TOGETHER_S}", seconds
            before[file] = before.get(file, 0) + seconds
    part_of_section = parts(sections.values())
    return {name for name, (section, _) in sections.items() if part_of_section[section] == part}


def turn() -> int | None:
    """The part of this run; None, which is all, where nobody asked for one."""
    asked = os.environ.get("KVASIR_TURN")
    return part_of(asked) if asked else None
