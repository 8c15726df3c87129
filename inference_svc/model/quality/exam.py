"""One exam: the same material for exact KV and for every rung that a model can have, within a time limit."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import FailedPrecondition, InvalidArgument

from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.quality.conversations import Conversations
from inference_svc.model.quality.findings import Findings, can_answer
from inference_svc.model.quality.material import (
    Extent,
    Sheet,
    conversation_sheets,
    own_texts,
    plain_tokens,
    repetitions,
    task_sheet,
)
from inference_svc.model.quality.measure import Meter, Way, exact_way, peer_ways, policy_way
from inference_svc.model.quality.tasks import Task, shipped_tasks

QUESTIONS = "questions"
CANARY = "canary"
TASKS = "tasks"


@dataclass(frozen=True, slots=True)
class Subject:
    """A loaded model, and how to read conversations in the language of its tokenizer, if there are any. `given`: a
    user's own material, which is then all that it is examined on.
    """

    runner: ModelRunner
    tokenizer: Any
    read_conversations: Callable[[], Conversations | None]
    context_tokens: int
    given: Sequence[Sheet] = ()

    def sheets_of(self, tasks: Sequence[Task]) -> list[Sheet]:
        """Of the tasks that its tokenizer can write, and its context has room for."""
        sheets = list[Sheet]()
        for task in tasks:
            with contextlib.suppress(InvalidArgument):  # no reason to refuse a model
                sheets.append(task_sheet(task, self.tokenizer))
        return [sheet for sheet in sheets if len(sheet.ids) <= self.context_tokens]


@dataclass(slots=True)
class Exam:
    """The material and the findings of an exam. `refused`: why the model cannot have a rung or peer, by name."""

    material: str  # QUESTIONS, CANARY or TASKS
    exact: Findings
    rungs: list[Findings] = field(default_factory=list)
    peers: list[Findings] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    is_cut_short: bool = False


def examine(
    subject: Subject,
    policies: Mapping[str, identity_pb2.KvPolicy],
    extent: Extent,
    *,
    clock: Callable[[], float],
    say: Callable[[str], None],
    time_limit_s: float | None = None,
    with_peers: bool = False,
) -> Exam:
    """Measure the policies, by name and cheapest first, beside exact KV. Runs on the MLX thread.

    The time limit is checked between texts: at least one text is read.
    """
    began = clock()
    meter = Meter(subject.runner, clock)
    material, sheets = material_for(subject, extent, meter)
    exact = exact_way(subject.runner)
    exam = Exam(material, exact.found)
    ways = list(rung_ways(subject.runner, policies, exam.refused))
    peers: list[Way] = []
    if with_peers:
        peers, refused = peer_ways(subject.runner)
        exam.refused |= refused
    exam.rungs, exam.peers = [way.found for way in ways], [way.found for way in peers]
    for number, sheet in enumerate(sheets, 1):
        say(
            f"reading {material} {number}: {len(sheet.ids)} tokens, {len(sheet.questions)} questions, {len(ways)} rungs"
        )
        meter.measure(sheet, exact, [*ways, *peers])
        if time_limit_s is not None and clock() - began > time_limit_s:
            exam.is_cut_short = True
            break
    return exam


def material_for(subject: Subject, extent: Extent, meter: Meter) -> tuple[str, Iterable[Sheet]]:
    """Questions for a model that can answer some, else the canary; and tasks with both."""
    if subject.given:
        return TASKS, subject.given
    conversations = subject.read_conversations()
    if conversations is not None and meter.can_ask():
        sheets = conversation_sheets(conversations, subject.tokenizer, extent)
        first = next(sheets)
        trial = exact_way(subject.runner)
        meter.measure(first, trial, ())
        if can_answer(trial.found):
            tasks = subject.sheets_of(conversations.tasks[: extent.tasks])
            return QUESTIONS, chain((first,), tasks, sheets)
    exact = exact_way(subject.runner)
    vocabulary = plain_tokens(subject.tokenizer, subject.runner.vocabulary_size)
    own = own_texts(vocabulary, extent, lambda beginning, tokens, seed: meter.go_on(exact, beginning, tokens, seed))
    # Alternating, so that an exam that is cut short has some of both.
    canary = chain.from_iterable(zip(repetitions(vocabulary, extent), own, strict=True))
    return CANARY, chain(canary, subject.sheets_of(shipped_tasks()[: extent.tasks]))


def rung_ways(
    runner: ModelRunner, policies: Mapping[str, identity_pb2.KvPolicy], refused: dict[str, str]
) -> Iterable[Way]:
    """A way for each policy, by name; into `refused` goes the reason for each that the model cannot have.

    Raises InvalidArgument for a policy that exists for no model.
    """
    for name, policy in policies.items():
        try:
            runner.layout.check_policy(runner.model, policy)
        except FailedPrecondition as error:
            refused[name] = error.message
        else:
            yield policy_way(runner, name, policy)
