"""What reply formats of one namespace cost others beside them: a part of each step, through a real model."""

import contextlib

import pytest
from kvasir.errors import KvasirError

from inference_svc.engine.api import Tokens
from inference_svc.engine.engine import Engine
from inference_svc.engine.scheduling import mask_budget
from inference_svc.formats.constraint import Constraint, ConstraintKind
from tests.inference.engine.driving import Driver, Listener, tokens_of

DEAR = Constraint(ConstraintKind.JSON_SCHEMA, '{"const": "' + "a" * 4_000 + '"}')  # about a millisecond each mask
ATTACKERS, REPLY = 6, 40


def generated(listener: Listener) -> int:
    return sum(len(event.ids) for event in listener.events if isinstance(event, Tokens))


def test_dear_formats_of_one_namespace_sit_out_steps_while_another_decodes(
    engine: Engine, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They all decoded in every step, and made each step of everybody many times as long."""
    # A tenth of a mask for each step, however long a step takes on this machine.
    monkeypatch.setattr(mask_budget, "PART", 0)
    monkeypatch.setattr(mask_budget, "_LEAST", 1e-4)
    attackers = [
        driver.submit(tokens_of(20, seed=seed), namespace="a", max_tokens=400, constraint=DEAR)
        for seed in range(ATTACKERS)
    ]
    for attacker in attackers:
        attacker.wait_for(Tokens, 2)
    victim = driver.submit(tokens_of(20, seed=9), namespace="b", max_tokens=REPLY)
    victim.wait_for(Tokens, 1)
    before = sum(map(generated, attackers))
    victim.end()
    assert sum(map(generated, attackers)) - before < REPLY
    for attacker in attackers:  # alone again, they are not held back
        attacker.wait_for(Tokens, REPLY)
        attacker.handle.result(60).cancel()
    for attacker in attackers:
        with contextlib.suppress(KvasirError):
            attacker.end()
