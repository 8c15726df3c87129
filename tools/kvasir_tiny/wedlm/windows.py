"""Windows of a training row: parts of learned replies with masks in them, reordered as WeDLM decodes them.

A window begins behind a reply's first token or later, and may end behind the reply: there the end token is to be
recovered again and again, because decoding cannot know that a reply ends. There are two kinds, as in decoding. Where
nothing is kept, masks alone stand behind the place that the last committed token gives. Where tokens are kept behind a
gap, they stand first, and masks at all other places: the first one always, and of the others a share that is drawn for
each window. Nothing is kept behind a kept end token. What a grammar forces is never masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tools.kvasir_tiny import rows, tokenizer
from tools.kvasir_tiny.rows import Batch
from tools.kvasir_tiny.wedlm.network import MASK, Windows

AT_THE_START = 0.4  # of the windows begin behind their reply's first token, which the prompt gives
WHOLE = 0.9  # of the windows are masks alone, as all are that decode from left to right
BEHIND = 0.1  # weight of an end token behind a reply's own


@dataclass(frozen=True)
class Plan:
    """`size` tokens of a window, one fewer than decoding draws where nothing is kept; a window for so many tokens of
    a row."""

    size: int = 16
    tokens_each: int = 128


class Reordered(NamedTuple):
    """Windows in physical order; `targets` [rows, windows, size] and their `weights`: 0 where a token is observed, and
    else 1 over the masked share of its window, after the paper."""

    windows: Windows
    targets: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


class WindowRows(NamedTuple):
    """Rows as `rows.make` makes them, and their windows."""

    ids: npt.NDArray[np.uint16]
    learned: npt.NDArray[np.bool_]
    reordered: Reordered


@dataclass(frozen=True)
class Maker:
    """Makes rows with windows, in any process; the same for the same batch."""

    plan: Plan

    def __call__(self, batch: Batch, folder: Path) -> WindowRows:
        ids, learned = rows.make(batch, folder)
        end = rows.encoder_of(folder).encode(tokenizer.END)[0]
        return WindowRows(ids, learned, self.reordered(ids, learned, end, batch.first_seed))

    def reordered(self, ids: npt.NDArray[np.uint16], learned: npt.NDArray[np.bool_], end: int, seed: int) -> Reordered:
        count, size = max(1, ids.shape[1] // self.plan.tokens_each), self.plan.size
        form = (len(ids), count, size)
        made = Reordered(
            Windows(np.zeros(form, np.int32), np.zeros(form, np.int32), np.zeros(form[:2], np.int32)),
            np.zeros(form, np.int32),
            np.zeros(form, np.float32),
        )
        for row in range(len(ids)):
            draw = np.random.default_rng([seed, row])
            known = np.roll(learned[row], 1)
            inside = np.flatnonzero(learned[row] & known)
            seconds = np.flatnonzero(learned[row] & known & ~np.roll(known, 1))
            for number in range(count if len(seconds) else 0):
                start = int(draw.choice(seconds if draw.random() < AT_THE_START else inside))
                self._fill(made, (row, number), start, ids[row], learned[row], end, draw)
        return made

    def _fill(
        self,
        made: Reordered,
        place: tuple[int, int],
        start: int,
        ids: npt.NDArray[np.uint16],
        learned: npt.NDArray[np.bool_],
        end: int,
        draw: np.random.Generator,
    ) -> None:
        tokens, weights = reply_from(start, self.plan.size + 1, ids, learned, end)
        share = 1.0 if draw.random() < WHOLE else draw.random()
        masked = (draw.random(len(tokens)) < share) & (weights > 0)
        masked[0] = True
        kept_ends = np.flatnonzero((tokens == end) & ~masked)
        masked[kept_ends[0] + 1 if len(kept_ends) else len(tokens) :] = True
        places = np.arange(1, len(tokens)) if masked.all() else np.arange(self.plan.size)
        order = places[np.argsort(masked[places], kind="stable")]  # observed tokens first, then masks
        made.windows.ids[place] = np.where(masked, MASK, tokens)[order]
        made.windows.positions[place] = start + order
        made.windows.starts[place] = start
        made.targets[place] = tokens[order]
        made.weights[place] = (weights * masked)[order] / masked[order].mean()


def reply_from(
    start: int, size: int, ids: npt.NDArray[np.uint16], learned: npt.NDArray[np.bool_], end: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """`size` tokens of a row from `start` on, end tokens in place of what stands behind the reply; and what each
    weighs: 0 where a grammar forces it."""
    tokens = np.full(size, end, np.int32)
    weights = np.full(size, BEHIND, np.float32)
    own = ids[start : start + size]
    ends = np.flatnonzero(own == end)
    own = own[: ends[0] + 1] if len(ends) else own
    tokens[: len(own)], weights[: len(own)] = own, learned[start : start + len(own)]
    return tokens, weights
