"""Breaks each rule of the schedule and of the budget once, in a copy, and sees which test notices:
`python -m tests.inference.pure.scheduler_mutants`. Writes SCHEDULER_MUTANTS.md beside itself.
"""

import argparse
import sys
from pathlib import Path

from tests.inference.engine.mutants import Mutant, report

ORDER, TURN = "scheduler", "scheduler_turn"
HISTORY, GATE, MEMORY = "scheduler_history", "scheduler_gate", "scheduler_memory"

MUTANTS = (
    # Pace
    Mutant(
        "the time does not end a step's prefill",
        "pacing.py",
        "if somebody_speaks and spent_s >= self.budget_s:",
        "if False:",
        ORDER,
    ),
    Mutant(
        "the time binds although nobody speaks",
        "pacing.py",
        "if somebody_speaks and spent_s",
        "if spent_s",
        ORDER,
    ),
    Mutant(
        "a step without time prefills nothing",
        "pacing.py",
        "        if not self.has_begun:\n",
        "        if False:\n",
        ORDER,
    ),
    Mutant(
        "a step takes more tokens than the table says",
        "pacing.py",
        "return self.tokens + cell_tokens <= most_tokens(deepest)",
        "return self.tokens <= most_tokens(deepest)",
        ORDER,
    ),
    Mutant("a shallow prompt sets a step's limit", "pacing.py", "deepest = max(", "deepest = min(", ORDER),
    Mutant(
        "who comes is not looked at before the step's end",
        "scheduler.py",
        "        self.waiting.append(turn)\n        self._is_disturbed = True",
        "        self.waiting.append(turn)",
        ORDER,
    ),
    Mutant(
        "a cancel is not looked at before the step's end",
        "scheduler.py",
        "return self._is_disturbed or is_cancelled",
        "return self._is_disturbed",
        ORDER,
    ),
    Mutant(
        "all that wait begin in one step, however long it takes",
        "scheduler.py",
        "if len(self.running) > running_before and not has_time():",
        "if False:",
        ORDER,
    ),
    # Order
    Mutant(
        "the first prompt is computed whole before the next",
        "scheduler.py",
        "        entry.served = self._served\n",
        "",
        ORDER,
    ),
    Mutant(
        "who comes new is served last for ever",
        "scheduler.py",
        "entry.served = self._served - 1",
        "entry.served = 1 << 60",
        ORDER,
    ),
    Mutant(
        "who comes new is served first", "scheduler.py", "entry.served = self._served - 1", "entry.served = 0", ORDER
    ),
    Mutant(
        "warm turns wait for their round",
        "scheduler.py",
        "lane = warm if warm and not (self._was_warm and cold) else cold",
        "lane = turns",
        ORDER,
    ),
    Mutant(
        "warm turns always go first",
        "scheduler.py",
        "lane = warm if warm and not (self._was_warm and cold) else cold",
        "lane = warm or cold",
        ORDER,
    ),
    Mutant(
        "background prompts are computed beside interactive ones",
        "scheduler.py",
        "turns = urgent or prefilling",
        "turns = prefilling",
        ORDER,
    ),
    Mutant(
        "turns begin in order of submission alone",
        "scheduler.py",
        "key=lambda one: (not self._is_urgent(one[1], lines), one[0])",
        "key=lambda one: one[0]",
        ORDER,
    ),
    Mutant(
        "nobody ages",
        "scheduler.py",
        "or self._now - self._entries[turn].waits_since_s >= self.rules.ageing_s",
        "or False",
        ORDER,
    ),
    Mutant(
        "a background turn before an interactive one of its line is put off",
        "scheduler.py",
        "            or turn.line in urgent_lines\n",
        "",
        ORDER,
    ),
    Mutant(
        "turns of one line run beside each other",
        "scheduler.py",
        "if turn.line is None or first[turn.line] == number",
        "if True",
        ORDER,
    ),
    Mutant(
        "turns of one line begin last first",
        "scheduler.py",
        "min(first.get(turn.line, entry.number), entry.number)",
        "max(first.get(turn.line, entry.number), entry.number)",
        ORDER,
    ),
    Mutant(
        "a small turn overtakes one without room",
        "scheduler.py",
        "if blocked is not None and (turn.memory_key is None or turn.memory_key not in spared):",
        "if False:",
        ORDER,
    ),
    Mutant(
        "more run than the rules say",
        "scheduler.py",
        "return self.rules.max_running is not None and len(self.running) >= self.rules.max_running",
        "return False",
        ORDER,
    ),
    Mutant(
        "a cancelled turn is served until it is removed",
        "scheduler.py",
        "if turn.is_prefilling and not turn.is_cancelled]",
        "if turn.is_prefilling]",
        f"{ORDER} {HISTORY}",
    ),
    Mutant(
        "waiting turns are cancelled only once they run",
        "scheduler.py",
        "[turn for turn in (*self.running, *self.waiting) if turn.is_cancelled]",
        "[turn for turn in self.running if turn.is_cancelled]",
        ORDER,
    ),
    # Siblings
    Mutant("siblings do not wait", "scheduler.py", "return not entry.gate_is_over\n", "return False\n", GATE),
    Mutant(
        "siblings wait for ever",
        "scheduler.py",
        "entry.gate_is_over = self._now - entry.gated_since_s >= self.rules.gate_s",
        "entry.gate_is_over = False",
        GATE,
    ),
    Mutant(
        "a sibling that waits never looks again",
        "scheduler.py",
        "if awaited is None or awaited.source not in self.running or ",
        "if awaited is None or False and ",
        GATE,
    ),
    Mutant(
        "a sibling waits for the other's whole prompt",
        "scheduler.py",
        "entry.awaits, self._is_disturbed = None, True",
        "pass",
        GATE,
    ),
    Mutant(
        "who an interactive sibling waits for stays in the background",
        "scheduler.py",
        "            or turn in self._awaited\n",
        "",
        GATE,
    ),
    Mutant(
        "namespaces share",
        "prefix_gate.py",
        "if turn.namespace is None or namespace != turn.namespace:",
        "if False:",
        GATE,
    ),
    Mutant(
        "turns without a namespace share",
        "prefix_gate.py",
        "if turn.namespace is None or namespace != turn.namespace:",
        "if namespace != turn.namespace:",
        GATE,
    ),
    Mutant("the last prompt token is shared", "prefix_gate.py", "turn.prompt_tokens - 1)", "turn.prompt_tokens)", GATE),
    Mutant(
        "what is not computed yet is given away",
        "prefix_gate.py",
        "other.chain, other.shareable))",
        "other.chain, other.final_shareable))",
        f"{GATE} {HISTORY}",
    ),
    Mutant(
        "less than a cell is worth waiting for",
        "prefix_gate.py",
        "best.shared_tokens >= have + self.cell_tokens",
        "best.shared_tokens > have",
        GATE,
    ),
    Mutant("the shared prefix is a block too long", "prefix_gate.py", "    return low\n", "    return low + 1\n", GATE),
    Mutant(
        "hot memories are not looked at",
        "prefix_gate.py",
        "            for key, namespace, memory in hot\n",
        "            for key, namespace, memory in ()\n",
        GATE,
    ),
    # Bytes
    Mutant(
        "a reservation is not asked for room", "memory_ledger.py", "if missing > self.free_bytes:", "if False:", MEMORY
    ),
    Mutant(
        "a lent memory counts twice",
        "memory_ledger.py",
        "return held, held - own",
        "return held, held",
        MEMORY,
    ),
    Mutant(
        "a memory larger than the turn needs is held in part",
        "memory_ledger.py",
        "held = max(needed_bytes, own)",
        "held = needed_bytes",
        MEMORY,
    ),
    Mutant(
        "reserved bytes are never given back", "memory_ledger.py", "self._reserved.pop(owner, None)", "pass", MEMORY
    ),
    Mutant(
        "a memory that does not fit is kept",
        "memory_ledger.py",
        "if size_bytes > self.free_bytes:",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "a turn grows without room",
        "memory_ledger.py",
        "if needed_bytes - self._reserved[owner] > self.free_bytes:",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "an undone turn's memory is lost",
        "hot_memories.py",
        "if key is not None and (memory := self._memories.get(key)):",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "memories are dropped for what cannot fit anyway",
        "hot_memories.py",
        "if missing_bytes > self.ledger.free_bytes + sum(sizes.values()):",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "the memory used last is dropped first",
        "hot_memories.py",
        ", -self._expected.turns",
        ", self._expected.turns",
        MEMORY,
    ),
    Mutant(
        "background memories are dropped like others",
        "hot_memories.py",
        "return self._memories[key].priority is Priority.INTERACTIVE, ",
        "return True, ",
        MEMORY,
    ),
    Mutant(
        "the least recently used goes, also in a ring",
        "expected_use.py",
        "if rhythm.interval is not None and silent <= rhythm.interval:",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "an agent that is overdue is expected at once",
        "expected_use.py",
        "if rhythm.interval is not None and silent <= rhythm.interval:",
        "if rhythm.interval is not None:",
        MEMORY,
    ),
    Mutant(
        "a planned turn's memory is dropped like others",
        "expected_use.py",
        "            rhythm.planned = self._now",
        "            pass",
        MEMORY,
    ),
    Mutant(
        "memories that waiting turns extend are not spared",
        "scheduler.py",
        "if other is not turn and other.memory_key is not None and self._is_urgent(other, lines) >= mine",
        "if False",
        MEMORY,
    ),
    Mutant(
        "memories are spared for ever",
        "scheduler.py",
        "if self._now - self._entries[turn].waits_since_s >= self.rules.patience_s:",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "two that spare each other wait while nobody runs",
        "scheduler.py",
        "if blocked is not None and not self.running and self._begin(blocked, (), try_begin):",
        "if False:",
        MEMORY,
    ),
    Mutant(
        "what cannot fit an empty budget waits for ever",
        "hot_memories.py",
        "        needed_bytes = min(needed_bytes, self.budget_bytes)\n",
        "",
        MEMORY,
    ),
    # Giving way
    Mutant(
        "the oldest gives way",
        "scheduler.py",
        "candidates.sort(key=lambda turn: self._entries[turn].number, reverse=True)",
        "candidates.sort(key=lambda turn: self._entries[turn].number)",
        MEMORY,
    ),
    Mutant(
        "interactive turns give way",
        "scheduler.py",
        "            turn.priority is Priority.BACKGROUND\n            and turn.can_be_put_aside",
        "            turn.can_be_put_aside",
        MEMORY,
    ),
    Mutant(
        "background turns ask others to give way",
        "scheduler.py",
        "        if blocked.priority is not Priority.INTERACTIVE:\n            return ()\n",
        "",
        MEMORY,
    ),
    Mutant(
        "turns give way without use",
        "scheduler.py",
        "        if missing_bytes > 0:\n            return ()\n",
        "",
        MEMORY,
    ),
    Mutant(
        "a turn gives way again and again",
        "scheduler.py",
        "            and entry.preemptions < self.rules.max_preemptions\n",
        "",
        MEMORY,
    ),
    Mutant("who cannot be put aside gives way", "scheduler.py", "            and turn.can_be_put_aside\n", "", MEMORY),
    Mutant(
        "who has no rows to give up is asked to",
        "scheduler.py",
        "            and not turn.is_restoring\n            and not turn.is_cancelled",
        "            and not turn.is_cancelled",
        MEMORY,
    ),
    Mutant(
        "who waits for its KV speaks",
        "scheduler.py",
        "not turn.is_prefilling and not turn.is_cancelled and not turn.is_restoring",
        "not turn.is_prefilling and not turn.is_cancelled",
        MEMORY,
    ),
    Mutant(
        "who waits for its KV prefills",
        "scheduler.py",
        "return [turn for turn in self.running if not turn.is_restoring]",
        "return [turn for turn in self.running]",
        MEMORY,
    ),
    Mutant(
        "what is spared counts as room",
        "hot_memories.py",
        "if idle != lent and idle not in spare)",
        "if idle != lent)",
        MEMORY,
    ),
    Mutant("a turn that aged gives way", "scheduler.py", "            and not entry.began_aged\n", "", MEMORY),
    Mutant(
        "the predecessor of an interactive turn gives way",
        "scheduler.py",
        "            and turn.line not in urgent_lines\n",
        "",
        MEMORY,
    ),
    Mutant(
        "who gave way takes the room back",
        "scheduler.py",
        "        entry.waits_since_s = now\n        entry.awaits",
        "        entry.awaits",
        MEMORY,
    ),
    # The turn
    Mutant(
        "a turn off the grid promises to share",
        "turn.py",
        "return max(self.shareable, whole_cells) if is_on_grid else self.shareable",
        "return max(self.shareable, whole_cells)",
        TURN,
    ),
    Mutant(
        "a resumed turn draws its first token again",
        "turn.py",
        "return ends_prompt and len(self.token_ids) == self.prompt_tokens",
        "return ends_prompt",
        TURN,
    ),
    Mutant(
        "a resumed turn tells its blocks again", "turn.py", "if self.full_blocks > self._full_told:", "if True:", TURN
    ),
    Mutant(
        "the chain is that of no KV identity",
        "turn.py",
        "chain_hashes(self._kv_identity_hash, self.plan.token_ids)",
        'chain_hashes("", self.plan.token_ids)',
        TURN,
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="words of the mutant")
    return report(
        MUTANTS,
        Path(__file__).with_name("SCHEDULER_MUTANTS.md"),
        "Mutants of the scheduler",
        "python -m tests.inference.pure.scheduler_mutants",
        tests_of="pure/test_",
        only=parser.parse_args().only,
    )


if __name__ == "__main__":
    sys.exit(main())
