"""The self-test of `kvasir doctor`: tell an agent a fact, kill both services, start them, and ask."""

import time
from dataclasses import dataclass, field
from typing import Any

from kvasir.cli.demo.mac import Mac, macs
from kvasir.cli.talking.turn import TurnResult
from kvasir.clients import message
from kvasir.errors import KvasirError

_TELL = message("user", "My name is Marco, and my favourite colour is green.")
_ASK = message("user", "What is my name?")


@dataclass
class _Report:
    began: float
    steps: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def step(self, text: str, is_right: bool = True) -> None:
        self.steps.append(f"{time.monotonic() - self.began:5.1f} s  {text}{'' if is_right else '  ← wrong'}")
        if not is_right:
            self.problems.append(f"self-test: {text}")


def self_test(model: str) -> dict[str, Any]:
    """Run it in a home of its own, which is removed. `problems` is empty when memory came back."""
    report = _Report(time.monotonic())
    try:
        with macs() as make:
            _tell_kill_ask(report, make("a", model=model), make("b", model=model))
    except KvasirError as error:
        report.step(error.message, is_right=False)
    return {"steps": report.steps, "problems": report.problems}


def _tell_kill_ask(report: _Report, mac: Mac, control: Mac) -> None:
    report.step(f"store and engine started in {mac.start():.1f} s")
    answered = _tell(mac)
    report.step(f"a turn of {answered.prompt_tokens} tokens was {answered.stored.state}", answered.is_durable)
    mac.kill()
    report.step(f"both were killed with -9 and started again in {mac.start():.1f} s")
    warm = mac.say("self-test", [_ASK])
    remembered = answered.prompt_tokens + answered.completion_tokens
    report.step(
        f"the next turn came {warm.source} with {warm.cached_tokens} cached tokens of {remembered} remembered "
        f"({warm.reason or 'no miss'}), first token after {warm.first_token_s:.3f} s",
        warm.source == "warm" and warm.cached_tokens >= remembered - 1,
    )
    control.start()
    _tell(control)
    same = control.say("self-test", [_ASK])
    report.step("it answers as an agent that was not killed", same.token_ids == warm.token_ids)


def _tell(mac: Mac) -> TurnResult:
    return mac.say("self-test", [_TELL], is_new=True)
