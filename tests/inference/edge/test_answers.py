"""The messages of replies, numbers and hand-overs have what the engine's records have: both are joined by name."""

from dataclasses import fields
from typing import Any

from google.protobuf.message import Message
from kvasir.inference.v1 import handover_pb2, inference_pb2
from kvasir.server.answers import name_in_record, written

from inference_svc.edge.service import ServiceLimits
from inference_svc.engine.api import CarriedTurn, Timings
from inference_svc.handover.giving import HandOverCost
from inference_svc.handover.passing import Opening, Stand, Surroundings
from inference_svc.memory.outcomes import MissReason, SnapshotOutcome, SnapshotState, Source
from inference_svc.memory.service_stats import EngineFacts, NamespaceCounters, ServiceStatus
from inference_svc.model.model_info import ModelInfo
from inference_svc.text.differences import Difference
from inference_svc.text.prefix_matching import Outcome
from inference_svc.turns.admission import AdmissionLimits
from inference_svc.turns.phases import BegunPrompt, BegunTurn
from inference_svc.turns.turn_data import Continuation, Shortening, TurnFinished, TurnRequest, TurnStarted, Warmed

OF_A_MODEL = {"state", "kv_policy", "kv_policy_why", "embedding_dimensions", "only_embeds"}
OF_A_NAMESPACE = {
    *("namespace", "turn_ends", "kv_memory_used_bytes", "owed_memories", "owed_bytes", "failed_memories"),
    *("prefilled_tokens", "cached_tokens", "decoded_tokens"),
}
OF_A_STAND = {"reply_token_ids", "computed_tokens", "cached_tokens", "shareable_tokens", "groups"}
# With the fields that no record has: those that are given.
ANSWERS: list[tuple[type[Message], tuple[Any, ...], set[str]]] = [
    (inference_pb2.Limits, (ServiceLimits, AdmissionLimits), set()),
    (inference_pb2.Started, (TurnStarted,), {"request_id", "model", "reason", "prompt_token_ids"}),
    (inference_pb2.Difference, (Difference,), set()),
    (inference_pb2.Finished, (TurnFinished,), {"reason", "usage", "choice"}),
    (inference_pb2.Usage, (TurnFinished,), set()),
    (inference_pb2.Timings, (Timings,), set()),
    (inference_pb2.SnapshotOutcome, (SnapshotOutcome,), set()),
    (inference_pb2.Shortening, (Shortening,), set()),
    (inference_pb2.Turn, (TurnRequest,), {"state", "age", "prompt_tokens", "cached_tokens", "completion_tokens"}),
    (inference_pb2.WarmResponse, (Warmed, TurnStarted), {"model", "computed_tokens", "reason"}),
    (inference_pb2.Model, (ModelInfo,), OF_A_MODEL),
    (inference_pb2.NamespaceStats, (NamespaceCounters,), OF_A_NAMESPACE),
    (inference_pb2.EngineStats, (ServiceStatus, EngineFacts), set()),
    (
        handover_pb2.TurnOpening,
        (Opening, BegunTurn, BegunPrompt),
        {"format", "request", "prompt_token_ids", "prompt_token_chars"},
    ),
    (handover_pb2.TurnSurroundings, (Surroundings,), set()),
    (handover_pb2.TurnStand, (Stand, CarriedTurn), OF_A_STAND),
    (handover_pb2.HandOverTurnResponse, (HandOverCost,), set()),
]


def test_each_field_of_an_answer_is_of_its_record() -> None:
    for kind, records, others in ANSWERS:
        known = {each.name for record in records for each in fields(record)}
        named = kind.DESCRIPTOR.fields_by_name
        assert {name for name, field in named.items() if name_in_record(field) not in known} == others, kind


def test_enums_and_times_of_a_record_are_written_as_the_wire_has_them() -> None:
    for miss in MissReason:
        found = written(inference_pb2.Started, miss=miss)
        assert inference_pb2.MissReason.Name(found.miss) == f"MISS_REASON_{miss.name}"
    for state in SnapshotState:
        outcome = written(inference_pb2.SnapshotOutcome, SnapshotOutcome(state))
        assert inference_pb2.SnapshotState.Name(outcome.state) == f"SNAPSHOT_STATE_{state.name}"
    started = TurnStarted(1, 0, Source.COLD, Outcome.NONE, 0, continuation=Continuation.BRANCHED)
    assert written(inference_pb2.Started, started).continuation == inference_pb2.CONTINUATION_BRANCHED
    assert written(inference_pb2.Timings, Timings(restore_s=1.5)).restore.ToTimedelta().total_seconds() == 1.5
