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

AT_THE_START = 0.5  # of the windows begin behind their reply's first token, which the prompt gives
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
        return self.with_windows(rows.make(batch, folder), folder, batch.first_seed)

    def with_windows(self, made: rows.Rows, folder: Path, *seed: int) -> WindowRows:
        """Rows with windows that `seed` draws."""
        ids, learned = made
        end = rows.encoder_of(folder).encode(tokenizer.END)[0]
        return WindowRows(ids, learned, self.reordered(ids, learned, end, np.random.default_rng(seed)))

    def reordered(
        self, ids: npt.NDArray[np.uint16], learned: npt.NDArray[np.bool_], end: int, draw: np.random.Generator
    ) -> Reordered:
        """All windows of all rows; those of a row without replies weigh nothing."""
        starts = self._starts(learned, draw)
        tokens, weights = replies_from(starts, self.plan.size + 1, ids, learned, end)
        shares = np.where(draw.random(starts.shape) < WHOLE, 1.0, draw.random(starts.shape))
        masked = (draw.random(tokens.shape) < shares[..., None]) & (weights > 0)
        masked[..., 0] = True
        ends_kept = (tokens == end) & ~masked
        masked |= np.cumsum(ends_kept, axis=-1) - ends_kept > 0
        places = np.arange(self.plan.size) + masked.all(-1)[..., None]  # behind the given token where nothing is kept
        order = np.argsort(np.take_along_axis(masked, places, -1), axis=-1, kind="stable")  # observed tokens first
        places = np.take_along_axis(places, order, -1)
        tokens, weights, masked = (np.take_along_axis(each, places, -1) for each in (tokens, weights, masked))
        positions = (starts[..., None] + places).astype(np.int32)
        windows = Windows(np.where(masked, MASK, tokens), positions, starts)
        weights = weights * masked * learned.any(-1)[:, None, None] / masked.mean(-1, keepdims=True)
        return Reordered(windows, tokens, weights.astype(np.float32))

    def _starts(self, learned: npt.NDArray[np.bool_], draw: np.random.Generator) -> npt.NDArray[np.int32]:
        """Where windows begin [rows, windows]: behind a reply's first token, or at any later one."""
        starts = np.zeros((len(learned), max(1, learned.shape[1] // self.plan.tokens_each)), np.int32)
        is_first, chances = draw.random(starts.shape) < AT_THE_START, draw.random(starts.shape)
        for row, mask in enumerate(learned):
            known = np.roll(mask, 1)
            inside, seconds = np.flatnonzero(mask & known), np.flatnonzero(mask & known & ~np.roll(known, 1))
            if len(seconds):
                chosen = (each[(chances[row] * len(each)).astype(int)] for each in (seconds, inside))
                starts[row] = np.where(is_first[row], *chosen)
        return starts


def replies_from(
    starts: npt.NDArray[np.int32], size: int, ids: npt.NDArray[np.uint16], learned: npt.NDArray[np.bool_], end: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """`size` tokens of rows from `starts` [rows, windows] on, end tokens in place of those behind the reply; and
    their weights: 0 where a grammar forces it, and behind the row."""
    places = starts[..., None] + np.arange(size)
    within = np.minimum(places, ids.shape[1] - 1)
    row = np.arange(len(ids))[:, None, None]
    own = ids[row, within]
    ends = (own == end) & (places == within)
    behind = np.cumsum(ends, axis=-1) - ends > 0
    weights = np.where(behind, BEHIND, learned[row, within] & (places == within))
    return np.where(behind | (places > within), end, own).astype(np.int32), weights.astype(np.float32)
