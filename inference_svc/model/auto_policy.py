"""Turns a request into a KV policy: a named rung is taken as it is, `auto` measures the model once. Its choices are
kept by weights digest in the state directory. That file is only a shortcut: if it cannot be read, has another format,
or no choice under the same conditions, the model is measured again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
from kvasir.cachestore.v1 import identity_pb2
from kvasir.credentials import replace_private_text

from inference_svc.kv.policy import LADDER, PolicyRequest, Rung, tried_by_auto
from inference_svc.model.quality import exam
from inference_svc.model.quality.findings import cheapest
from inference_svc.model.quality.material import AT_LOAD, Extent

_LOG = structlog.get_logger(__name__)
TIME_LIMIT_S = 60.0  # for each rung; checked between texts
# Increased when the judgement or its questions change: older choices are then measured again.
FORMAT = 2
FILE = "kv-policies.json"


@dataclass(frozen=True, slots=True)
class Conditions:
    weights_digest: str
    compute_type: str
    exact_layers: Sequence[int]

    @property
    def key(self) -> str:
        return f"{self.weights_digest}:{self.compute_type}:{','.join(map(str, self.exact_layers))}"


@dataclass(frozen=True, slots=True)
class Choice:
    """A rung, and the reason for it."""

    rung: Rung
    why: str


def remembered(directory: Path, conditions: Conditions) -> Choice | None:
    entry = _choices(directory).get(conditions.key)
    if not isinstance(entry, dict):
        return None
    rung, why = entry.get("rung"), entry.get("why")
    if not isinstance(why, str):
        return None
    return next((Choice(each, why) for each in Rung if each.value == rung), None)


def remember(directory: Path, conditions: Conditions, choice: Choice) -> None:
    """Add a choice; the file is replaced whole. Raises OSError when it cannot be written."""
    choices = _choices(directory) | {conditions.key: {"rung": choice.rung.value, "why": choice.why}}
    text = json.dumps({"format": FORMAT, "choices": choices}, indent=1, sort_keys=True)
    replace_private_text(directory / FILE, text)


def _choices(directory: Path) -> dict[str, Any]:
    try:
        content: Any = json.loads((directory / FILE).read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("choices"), dict):
        return {}
    choices: dict[str, Any] = content["choices"]
    return choices


@dataclass(frozen=True, slots=True)
class ChosenPolicy:
    policy: identity_pb2.KvPolicy
    why: str


def chosen_policy(
    request: PolicyRequest,
    subject: exam.Subject,
    weights_digest: str,
    state_dir: Path,
    clock: Callable[[], float],
    extent: Extent = AT_LOAD,
) -> ChosenPolicy:
    """The policy to use. Raises InvalidArgument for layers that the model does not have. Runs on the MLX thread."""
    compute_type, layer_count = subject.runner.compute_type, len(subject.runner.layers)
    policies = {rung: request.policy(rung, compute_type, layer_count) for rung in LADDER}
    if request.rung is not None:
        return ChosenPolicy(policies[request.rung], "asked for")
    conditions = Conditions(weights_digest, compute_type, policies[Rung.Q4].exact_layers)
    known = remembered(state_dir, conditions)
    if known is not None:
        _LOG.info("kv_policy.remembered", policy=known.rung.value, why=known.why)
        return ChosenPolicy(policies[known.rung], f"auto, remembered: {known.why}")
    choice = _measured(subject, policies, extent, clock)
    _remember(state_dir, conditions, choice)
    _LOG.info("kv_policy.chosen", policy=choice.rung.value, why=choice.why)
    return ChosenPolicy(policies[choice.rung], f"auto: {choice.why}")


def _measured(
    subject: exam.Subject, policies: dict[Rung, identity_pb2.KvPolicy], extent: Extent, clock: Callable[[], float]
) -> Choice:
    """Climb the ladder with one exam for each rung: most models pass the first, and need no other."""
    refused: dict[str, str] = {}
    ways = exam.rung_ways(subject.runner, {rung.value: policies[rung] for rung in LADDER[:-1]}, refused)
    tried = tried_by_auto([way.found.name for way in ways])
    reasons = [f"{name} cannot be had ({why})" for name, why in refused.items()]
    for name in tried:
        found = exam.examine(
            subject,
            {name: policies[Rung(name)]},
            extent,
            clock=clock,
            say=lambda text: _LOG.info("kv_policy.measuring", what=text),
            time_limit_s=TIME_LIMIT_S,
        )
        for each in (found.exact, *found.rungs):
            facts: dict[str, Any] = each.as_json()
            _LOG.info("kv_policy.measured", kept_as=facts.pop("name"), **facts)
        winner, why = cheapest(found.rungs, found.exact)
        reasons.append(f"by {found.material}: {why}")
        if winner is not None:
            return Choice(Rung(name), "; ".join(reasons))
    return Choice(LADDER[-1], "; ".join([*reasons, f"{LADDER[-1].value} is the most exact there is"]))


def _remember(state_dir: Path, conditions: Conditions, choice: Choice) -> None:
    try:
        remember(state_dir, conditions, choice)
    except OSError as error:
        _LOG.warning("kv_policy.not_remembered", error=str(error))
