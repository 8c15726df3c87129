"""The exam on a user's text: every policy, each layer alone (no other error hides it), and the best mixture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.cachestore.v1 import identity_pb2
from kvasir.errors import InvalidArgument
from kvasir.formats.tensor_layouts import layer_tensors

from inference_svc.kv.policy import name_of
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.quality.exam import rung_ways
from inference_svc.model.quality.findings import Findings
from inference_svc.model.quality.material import Sheet
from inference_svc.model.quality.measure import Meter, Way, exact_way, peer_ways, policy_way
from kvasir_bench.quality.mixing import CHOOSING, LayerCost, kept_exact, suggested

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Mixture:
    """A policy whose layers are measured, and its bytes a token with exact ones; None: those of the next policy."""

    policy: str
    budget_bytes: int | None = None


@dataclass(slots=True)
class TextExam:
    """The findings. `mixed` is None where the budget keeps no layer exact that was not."""

    exact: Findings
    rungs: list[Findings]
    peers: list[Findings]
    refused: dict[str, str]
    budget_bytes: int
    layers: list[LayerCost] = field(default_factory=list)
    exact_layers: tuple[int, ...] = ()  # of the mixture
    mixed: Findings | None = None
    suggests: str = ""  # the name of a rung, or of the mixture
    why: str = ""


def examine_text(
    runner: ModelRunner,
    sheets: Sequence[Sheet],
    policies: Mapping[str, identity_pb2.KvPolicy],
    mixture: Mixture,
    *,
    clock: Callable[[], float],
    say: Say,
) -> TextExam:
    """Measure the policies, cheapest first, on 16 windows. Raises InvalidArgument (budget) and FailedPrecondition."""
    policy = policies[mixture.policy]
    runner.layout.check_policy(runner.model, policy)
    refused: dict[str, str] = {}
    rungs = list(rung_ways(runner, policies, refused))
    peers, refused_peers = peer_ways(runner)
    budget = _budget(rungs, mixture)
    exact, costs = exact_way(runner), list(_layer_costs(runner, policy))
    found = TextExam(exact.found, _found(rungs), _found(peers), refused | refused_peers, budget)
    found.layers = [cost for cost, _ in costs]
    meter, choosing = Meter(runner, clock), range(len(sheets))[CHOOSING]
    for number, sheet in enumerate(sheets):
        ways = [*rungs, *peers, *([way for _, way in costs] if number in choosing else ())]
        say(f"reading window {number + 1} of {len(sheets)}: {len(sheet.ids)} tokens, in {len(ways) + 1} ways")
        meter.measure(sheet, exact, ways)
    _mix(found, runner, policy, mixture, sheets, meter, say)
    return found


def _mix(
    found: TextExam,
    runner: ModelRunner,
    policy: identity_pb2.KvPolicy,
    mixture: Mixture,
    sheets: Sequence[Sheet],
    meter: Meter,
    say: Say,
) -> None:
    """Choose the layers, measure the policy with them exact, and compare."""
    plain = next(each for each in found.rungs if each.name == mixture.policy)
    chosen = kept_exact(found.layers, found.budget_bytes - plain.bytes_per_token)
    found.exact_layers = tuple(sorted({*policy.exact_layers, *chosen}))
    if chosen:
        mixed = _with_exact(policy, found.exact_layers)
        way = policy_way(runner, name_of(mixed), mixed)
        found.mixed = way.found
        say(f"reading all windows under {way.found.name}")
        exact = exact_way(runner)
        for sheet in sheets:
            meter.measure(sheet, exact, [way])
    best, found.why = suggested([*found.rungs, *([found.mixed] if found.mixed else [])], found.budget_bytes)
    found.suggests = best.name


def _layer_costs(runner: ModelRunner, policy: identity_pb2.KvPolicy) -> list[tuple[LayerCost, Way]]:
    """For each layer that the policy stores in fewer bits, the policy with all others exact."""
    with_rows = [index for index, layer in enumerate(runner.layers) if layer.kind != identity_pb2.LAYER_KIND_STATE]
    costs = []
    for layer in with_rows:
        if layer in policy.exact_layers:
            continue
        alone = _with_exact(policy, [other for other in with_rows if other != layer])
        way = policy_way(runner, f"layer {layer}", alone)
        costs.append((LayerCost(layer, _exact_adds(runner, policy, layer), way.found), way))
    return costs


def _exact_adds(runner: ModelRunner, policy: identity_pb2.KvPolicy, layer: int) -> int:
    """Bytes a token that the layer takes more when it is exact."""

    def size_bytes(of: identity_pb2.KvPolicy) -> int:
        identity = identity_pb2.KvIdentity(layers=runner.layers, policy=of)
        return sum(tensor.size_bytes for tensor in layer_tensors(identity, layer, 1))

    return size_bytes(_with_exact(policy, [layer])) - size_bytes(policy)


def _with_exact(policy: identity_pb2.KvPolicy, layers: Sequence[int]) -> identity_pb2.KvPolicy:
    changed = identity_pb2.KvPolicy()
    changed.CopyFrom(policy)
    changed.exact_layers[:] = layers
    return changed


def _budget(rungs: Sequence[Way], mixture: Mixture) -> int:
    costs = {way.found.name: way.found.bytes_per_token for way in rungs}
    own = costs[mixture.policy]
    if mixture.budget_bytes is None:
        return min((cost for cost in costs.values() if cost > own), default=own)
    if mixture.budget_bytes < own:
        raise InvalidArgument(
            f"budget: {mixture.policy} takes {own:,} bytes a token already, expected no less, "
            f"got {mixture.budget_bytes:,}",
            field="kv_bytes",
        )
    return mixture.budget_bytes


def _found(ways: Sequence[Way]) -> list[Findings]:
    return [way.found for way in ways]
