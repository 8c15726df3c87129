"""Training rows: conversations of the world as arrays of token ids, made by a pool of processes in a fixed order."""

from __future__ import annotations

import multiprocessing
import multiprocessing.pool
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tools.kvasir_tiny import desk, tokenizer, world
from tools.kvasir_tiny.everyday import training
from tools.kvasir_tiny.words import Dice

PADDING = 0  # id of the padding token
LOOK_AHEAD = 48  # batches made before they are needed

Rows = tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]
Made = TypeVar("Made")
_encoders: dict[Path, tokenizer.Encoder] = {}


@dataclass(frozen=True)
class Batch:
    """One batch of rows: `count` conversations of `length` + 1 tokens each."""

    first_seed: int
    count: int
    length: int
    held_out: bool = False
    kind: str = "conversation"  # the function of `everyday.training` that makes them


def encoder_of(folder: Path) -> tokenizer.Encoder:
    """The folder's tokenizer, loaded once in each process."""
    if folder not in _encoders:
        _encoders[folder] = tokenizer.load(folder)
    return _encoders[folder]


def make(batch: Batch, folder: Path) -> Rows:
    """Token ids [count, length + 1], and for each whether it is learned."""
    encoder = encoder_of(folder)
    ids = np.full((batch.count, batch.length + 1), PADDING, np.uint16)
    learned = np.zeros((batch.count, batch.length + 1), np.bool_)
    for row in range(batch.count):
        seed = batch.first_seed + row
        talk = _conversation(batch, seed, encoder)
        # An engine appends messages to its memory: the model must understand a conversation both cut and whole.
        pieces = Dice(f"kvasir-tiny pieces {seed}").chance(0.3)
        tokens, taught = encoder.conversation(talk, in_pieces=pieces, until=batch.length + 1)
        n = min(len(tokens), batch.length + 1)
        ids[row, :n] = tokens[:n]
        learned[row, :n] = taught[:n]
    return ids, learned


def _conversation(batch: Batch, seed: int, encoder: tokenizer.Encoder) -> desk.Conversation:
    if batch.held_out:
        return world.training_conversation(seed, batch.length + 16, encoder.count, held_out=True)
    made: Callable[[int, int, desk.Count], desk.Conversation] = getattr(training, batch.kind)
    return made(seed, batch.length + 16, encoder.count)


def of_conversations(talks: Sequence[desk.Conversation], length: int, folder: Path, with_replies: bool = False) -> Rows:
    """Rows of given conversations with what is asked after them; replies in them are learned only `with_replies`."""
    encoder = encoder_of(folder)
    ids = np.full((len(talks), length + 1), PADDING, np.uint16)
    learned = np.zeros((len(talks), length + 1), np.bool_)
    for row, talk in enumerate(talks):
        asked = [
            {"role": role, "content": text}
            for question in talk.questions
            for role, text in (("user", question.text), ("assistant", question.answer))
        ]
        before = talk.taught if with_replies else [False] * len(talk.messages)
        taught = before + [False, True] * len(talk.questions)
        tokens, mask = encoder.conversation(replace(talk, messages=talk.messages + asked, taught=taught))
        n = min(len(tokens), length + 1)
        ids[row, :n], learned[row, :n] = tokens[:n], mask[:n]
    return ids, learned


def stream(
    batches: Iterator[tuple[Batch, ...]],
    folder: Path,
    processes: int,
    made: Callable[[Batch, Path], Made],
) -> Iterator[tuple[Made, ...]]:
    """The rows of each group of batches, in order; `processes` = 0 makes them here."""
    if not processes:
        for group in batches:
            yield tuple(made(batch, folder) for batch in group)
        return
    # Spawned, not forked: a fork of a process that uses a GPU may hang.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        waiting: deque[list[multiprocessing.pool.AsyncResult[Made]]] = deque()
        for group in batches:
            waiting.append([pool.apply_async(made, (batch, folder)) for batch in group])
            if len(waiting) > LOOK_AHEAD:
                yield tuple(result.get() for result in waiting.popleft())
        while waiting:
            yield tuple(result.get() for result in waiting.popleft())
