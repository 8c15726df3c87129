"""What training reads: the small world's own conversations, scenes of several agents, everyday talk, and visits."""

from __future__ import annotations

from dataclasses import replace

from tools.kvasir_tiny import world
from tools.kvasir_tiny.desk import Conversation, Count
from tools.kvasir_tiny.everyday.daily_life import DailyWriter, draw_style
from tools.kvasir_tiny.everyday.recitals import RecitalWriter, ReviewWriter
from tools.kvasir_tiny.everyday.scenes import SceneWriter
from tools.kvasir_tiny.everyday.visits import VisitWriter
from tools.kvasir_tiny.words import Dice

SMALL_WORLD_SHARE = 0.15
SCENE_SHARE = 0.2
VISIT_SHARE = 0.4
# Of short rows: those with summaries, and those that review; the others are of all sorts.
SHORT_RECITAL_SHARE = 0.45
SHORT_REVIEW_SHARE = 0.35


def conversation(seed: int, target_tokens: int, count: Count) -> Conversation:
    """Conversation number `seed`: at least `target_tokens`, its last part full of questions."""
    dice = Dice(f"kvasir-tiny edition 3 {seed}")
    draw = dice.random()
    if draw < SMALL_WORLD_SHARE:
        return world.training_conversation(seed, target_tokens, count)
    style = draw_style(dice, target_tokens)
    if draw < SMALL_WORLD_SHARE + SCENE_SHARE:
        return scene(seed, target_tokens, count)
    if draw < SMALL_WORLD_SHARE + SCENE_SHARE + VISIT_SHARE:
        return visit(seed, target_tokens, count)
    writer = DailyWriter(seed, target_tokens, count, False, style, 0.35 + 0.65 * dice.random())
    writer.write(examination=0.25)
    return writer.conversation()


def visit(seed: int, target_tokens: int, count: Count, *, held_out: bool = False) -> Conversation:
    """Visit number `seed`."""
    style = draw_style(Dice(f"kvasir-tiny visit {seed}"), target_tokens)
    writer = VisitWriter(seed, target_tokens, count, held_out, style)
    writer.write(examination=0.35)
    return writer.conversation()


def recital(seed: int, target_tokens: int, count: Count) -> Conversation:
    """Visit number `seed` of those with summaries."""
    style = draw_style(Dice(f"kvasir-tiny recital {seed}"), target_tokens)
    writer = RecitalWriter(seed, target_tokens, count, False, style)
    writer.recite()
    return writer.conversation()


def review(seed: int, target_tokens: int, count: Count) -> Conversation:
    """Conversation number `seed` of those whose second half is questions: everyday talk and visits, few others."""
    dice = Dice(f"kvasir-tiny review {seed}")
    draw, style = dice.random(), draw_style(dice, target_tokens)
    if draw < 0.1:
        return scene(seed, target_tokens, count)
    if draw < 0.2:
        return world.training_conversation(seed, target_tokens, count)
    if draw < 0.45:
        writer: DailyWriter = VisitWriter(seed, target_tokens, count, False, style)
    else:
        writer = ReviewWriter(seed, target_tokens, count, False, replace(style, room=False), 0.8)
    writer.write(examination=0.5)
    return writer.conversation()


def short(seed: int, target_tokens: int, count: Count) -> Conversation:
    """Conversation number `seed` of those that short rows hold."""
    draw = Dice(f"kvasir-tiny short {seed}").random()
    if draw < SHORT_RECITAL_SHARE:
        return recital(seed, target_tokens, count)
    made = review if draw < SHORT_RECITAL_SHARE + SHORT_REVIEW_SHARE else conversation
    return made(seed, target_tokens, count)


def scene(seed: int, target_tokens: int, count: Count) -> Conversation:
    """Scene number `seed`, as its one agent lives through it."""
    writer = SceneWriter(seed, target_tokens, count, draw_style(Dice(f"kvasir-tiny scene {seed}"), target_tokens))
    writer.write(examination=0.25)
    return writer.conversation()
