"""Whatever happens to the turns, in whatever order: nobody waits for ever, and no byte is lost or counted twice."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from inference_svc.engine.api import Priority
from inference_svc.engine.scheduling.schedulable import Rules
from tests.inference.scheduling.scheduling_world import (
    BACKGROUND,
    CELL,
    INTERACTIVE,
    Job,
    World,
    chain_of,
    key_of,
    memory,
)
from tests.made_models.sampling import sampled

BUDGET = 12 * CELL
RULES = Rules(longest_gap_s=0.1, ageing_s=3.0, prefix_wait_s=2.0, patience_s=1.0, max_preemptions=2)
AGENTS = st.integers(0, 4)
PRIORITIES = st.sampled_from([INTERACTIVE, INTERACTIVE, BACKGROUND])


class History(RuleBasedStateMachine):
    """Turns come, are cancelled, grow; memories are forked and dropped; steps are made and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(BUDGET, RULES, at_once=5)
        self.submitted: list[Job] = []

    @rule(
        agent=AGENTS,
        tokens=st.integers(1, 5 * CELL),
        reply=st.integers(1, 6),
        priority=PRIORITIES,
        extra=st.integers(0, CELL),
    )
    def goes_on(self, agent: int, tokens: int, reply: int, priority: Priority, extra: int) -> None:
        known = self.world.memories.sizes().get(key_of(agent), 0)
        if known + tokens + reply + extra <= BUDGET:
            job = self.world.turn(agent, tokens, reply, priority=priority, extra_bytes=extra)
            self.submitted.append(job)

    @rule(agent=AGENTS, kept=st.integers(1, CELL), reply=st.integers(1, 6))
    def goes_back(self, agent: int, kept: int, reply: int) -> None:
        """A turn that keeps only the beginning of the agent's memory."""
        job = self.world.turn(agent, 0, reply, prompt_tokens=kept + 1)
        job.reusable_tokens = min(job.reusable_tokens, kept)
        self.submitted.append(job)

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=5), rest=st.integers(0, 9), priority=PRIORITIES)
    def shares(self, blocks: list[int], rest: int, priority: Priority) -> None:
        """A turn that remembers nothing and whose prompt may be another's too."""
        tokens = len(blocks) * CELL + rest
        job = Job(tokens, 3, priority=priority, namespace="home", chain=chain_of(*blocks))
        self.world.submit(job)
        self.submitted.append(job)

    @rule(cells=st.integers(1, 8), reply=st.integers(1, 60), namespace=st.sampled_from(["home", "away", None]))
    def works_in_the_background(self, cells: int, reply: int, namespace: str | None) -> None:
        job = Job(cells * CELL, reply, priority=BACKGROUND, namespace=namespace)
        self.world.submit(job)
        self.submitted.append(job)

    @precondition(lambda self: self.world.scheduler.waiting or self.world.scheduler.running)
    @rule(data=st.data())
    def is_cancelled(self, data: st.DataObject) -> None:
        turns = [*self.world.scheduler.waiting, *self.world.scheduler.running]
        data.draw(st.sampled_from(turns)).is_cancelled = True

    @rule(agent=AGENTS, source=AGENTS, size=st.integers(1, 2 * CELL))
    def is_forked(self, agent: int, source: int, size: int) -> None:
        """Also while turns of either run: pages are shared, and nothing is copied."""
        found = self.world.memories.get(key_of(source))
        if found is not None:
            self.world.memories.put(key_of(agent), memory(found.kv.fork(size)))

    @rule(agent=AGENTS)
    def is_dropped(self, agent: int) -> None:
        self.world.memories.drop(key_of(agent))

    @rule(steps=st.integers(1, 4))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            doomed = self.world.scheduler.cancelled()
            self.world.step()
            for job in doomed:
                assert job in self.world.ended
                assert job.reservation is None

    @rule(seconds=st.floats(0.0, 1.0))
    def time_passes(self, seconds: float) -> None:
        self.world.now += seconds

    @invariant()
    def free_and_held_are_all_there_is(self) -> None:
        self.world.check()

    @invariant()
    def turns_of_a_line_begin_in_order(self) -> None:
        for agent in range(5):
            turns = [job for job in self.submitted if job.agent_key == key_of(agent) and not job.is_cancelled]
            begun = [job.begun_s for job in turns if not job.lost_memory]
            known = [second for second in begun if second is not None]
            assert begun[: len(known)] == known, "a turn began before its predecessor"
            assert known == sorted(known)

    @invariant()
    def nobody_is_preempted_more_often_than_the_rules_say(self) -> None:
        assert all(job.preemptions <= RULES.max_preemptions for job in self.submitted)

    def teardown(self) -> None:
        """Without new turns everybody comes to an end, and all reservations are given back."""
        left = [*self.world.scheduler.waiting, *self.world.scheduler.running]
        cells = sum(job.prompt_tokens // CELL + 2 for job in left)
        self.world.run(self.world.steps + 3 * cells + 4 * sum(job.reply_tokens for job in left) + 10)
        assert self.world.memories.ledger.promised_bytes == 0
        assert sorted(map(id, self.world.ended)) == sorted(map(id, self.submitted))


@pytest.mark.long(2)
def test_after_any_history_bytes_add_up_lines_keep_their_order_cancels_free_and_everybody_ends() -> None:
    checks = list(HealthCheck)
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=sampled(16, of=100), stateful_step_count=50, deadline=None, suppress_health_check=checks
        ),
    )
