"""Faults of the batched KV, each with the tests that are asked whether they notice it."""

from pathlib import Path

from tests.mutation.mutant import Mutant, Suite

BATCH, WINDOW, BATCHING = "kv/test_backends", "kv/test_window_kv", "engine/test_batching"

MUTANTS = (
    Mutant(
        "a copy is decoded from rows that lag behind",
        "batch_kv.py",
        "(row := self.flush(slot)).offset",
        "(row := self.rows[slot]).offset",
        BATCH,
    ),
    Mutant(
        "who takes a free slot brings no decoded rows along",
        "batched_rows.py",
        "                self._decoded.move(last, slot, self._rows_to_move(last))\n",
        "                pass\n",
        BATCH,
    ),
    Mutant(
        "who takes a free slot brings no staged codes along",
        "batched_rows.py",
        "            self._staged.move(last, slot, self._slots[last].staged)\n",
        "",
        BATCH,
    ),
    Mutant(
        "a row sees one position more",
        "batch_kv.py",
        "[None, None, None] <= last",
        "[None, None, None] <= last + 1",
        BATCH,
    ),
    Mutant(
        "a row does not see itself",
        "batch_kv.py",
        "[None, None, None] <= last",
        "[None, None, None] <= mx.maximum(last - 1, 0)",
        BATCH,
    ),
    Mutant(
        "staged codes of one sequence are another's",
        "slot_arrays.py",
        "        return tuple(array[slot : slot + 1, :, :rows] for array in self.arrays)",
        "        return tuple(array[:1, :, :rows] for array in self.arrays)",
        BATCH,
    ),
    Mutant(
        "few rows are not padded",
        "row_exact.py",
        "_MIN_ROWS = 4",
        "_MIN_ROWS = 1",
        BATCH,
    ),
    Mutant(
        "codes are staged and never computed",
        "batched_rows.py",
        "tuple(mx.depends(list(new), self._stage(codes)))",
        "(self._stage(codes), new)[1]",
        BATCH,
    ),
    Mutant(
        "V takes K's heads",
        "batched_rows.py",
        "*(part[:, heads:] for part in parts))",
        "*(part[:, :heads] for part in parts))",
        BATCH,
    ),
    Mutant(
        "the offset that a model holds is one array for ever",
        "batched_rows.py",
        "        return mx.array(self.lengths)",
        "        self._held = getattr(self, '_held', mx.array(self.lengths))\n"
        "        self._held[:] = mx.array(self.lengths)\n"
        "        return self._held",
        BATCH,
    ),
    Mutant(
        "a ring is filled one place off",
        "batch_window.py",
        "        start = (row.offset - rows) % row.window",
        "        start = (row.offset - rows + 1) % row.window",
        WINDOW,
    ),
    Mutant(
        "a ring is filled from rows that lag behind",
        "batch_window.py",
        "        row = self.flush(slot)\n",
        "        row = self._slots[slot].row\n",
        WINDOW,
    ),
    Mutant(
        "a slot whose sequence left keeps its mark of being decoded",
        "batched_rows.py",
        "            self._slots[slot] = self._slots[last]\n",
        "            self._slots[last].is_decoded = self._slots[slot].is_decoded\n"
        "            self._slots[slot] = self._slots[last]\n",
        BATCH,
    ),
    Mutant(
        "a ring shows places that no position has",
        "batch_window.py",
        " & (places < self._window)",
        "",
        WINDOW + " " + BATCH,
    ),
    Mutant(
        "a sibling begins with more than it shares",
        "beginning.py",
        "kv.fork_of(shared_tokens)",
        "kv.fork()",
        BATCHING,
    ),
    Mutant(
        "a memory whose layers may disagree serves again",
        "engine_worker.py",
        "            self.memories.drop(sequence.plan.key)\n        sequence.memory = None\n",
        "            pass\n",
        BATCHING,
    ),
)

KV = Suite(
    "kv",
    "Mutants of the batched KV",
    "inference_svc",
    Path("tests/inference/kv/MUTANTS.md"),
    MUTANTS,
    tests="tests/inference/{}.py",
)
