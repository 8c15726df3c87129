"""The gate: what a KV policy costs is measured on the loaded model, and auto takes no rung that costs it answers."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from inference_svc.kv.codec import RotatedCodec
from inference_svc.kv.policy import LADDER, PolicyRequest, Rung, name_of, policy_of
from inference_svc.kv.sequence_kv import SequenceKV
from inference_svc.model import kvasir_tiny
from inference_svc.model.auto_policy import FILE, ChosenPolicy, chosen_policy
from inference_svc.model.loading import load
from inference_svc.model.model_identity import tokenizer_digest
from inference_svc.model.model_runner import ModelRunner
from inference_svc.model.quality.conversations import Conversations
from inference_svc.model.quality.exam import CANARY, QUESTIONS, Exam, Subject, examine
from inference_svc.model.quality.findings import RECALL, TOOL_CALLS, Share, judged
from inference_svc.model.quality.material import Extent, conversation_sheets
from inference_svc.model.quality.measure import Caches, Meter, Way, exact_way, policy_way
from tests.inference.engine.families import GEMMA3, JAMBA, write_family
from tests.inference.engine.models.outlier_model import write_outlier_model

GLANCE = Extent((300,), recall_each=2, tools_each=2, canaries=1, canary_tokens=64)
BRIEF = Extent((300,), recall_each=1, tools_each=1, canaries=1, canary_tokens=32)
AUTO = PolicyRequest.parse("auto")


def subject_of(directory: Path) -> Subject:
    loaded = load(directory, "float32")
    conversations = Conversations.read_for(kvasir_tiny.conversations_path(), tokenizer_digest(directory))
    return Subject(ModelRunner(loaded.model), loaded.tokenizer, lambda: conversations, loaded.context_tokens)


def examined(subject: Subject, rungs: tuple[Rung, ...] = LADDER, with_peers: bool = False) -> Exam:
    policies = {rung.value: policy_of(rung, "float32") for rung in rungs}
    return examine(subject, policies, GLANCE, clock=time.monotonic, say=lambda _: None, with_peers=with_peers)


def chosen(
    subject: Subject, state_dir: Path, digest: str = "d" * 64, request: PolicyRequest = AUTO, extent: Extent = GLANCE
) -> ChosenPolicy:
    return chosen_policy(request, subject, digest, state_dir, time.monotonic, extent)


NO_CUDA = pytest.mark.cpu_only("mlx-lm's quantized caches multiply in ways that MLX's CUDA back end does not have")


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return subject_of(kvasir_tiny.path())


@pytest.fixture(scope="module")
def outliers(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return subject_of(write_outlier_model(tmp_path_factory.mktemp("outliers"), times=32))


def test_low_bit_kv_that_breaks_tool_calls_fails_the_gate(outliers: Subject) -> None:
    """(LESSONS 16)"""
    exam = examine(outliers, {"q4": policy_of(Rung.Q4, "float32")}, BRIEF, clock=time.monotonic, say=lambda _: None)
    [q4] = exam.rungs
    assert exam.exact.share(TOOL_CALLS).right == exam.exact.share(TOOL_CALLS).n == 1
    assert q4.share(TOOL_CALLS).right == 0
    assert not judged(q4, exam.exact).passes


@pytest.mark.long(8)
@NO_CUDA
def test_auto_goes_up_to_the_rung_where_tool_calls_are_made_again(outliers: Subject, tmp_path: Path) -> None:
    """(LESSONS 16) Exact KV makes every call; four bits, ours or mlx-lm's, make none; and auto says why it goes up."""
    exam = examined(outliers, (Rung.Q4, Rung.K8V4), with_peers=True)
    q4, k8v4 = exam.rungs
    assert exam.material == QUESTIONS
    assert exam.exact.share(TOOL_CALLS).right == exam.exact.share(TOOL_CALLS).n == 2
    assert q4.share(TOOL_CALLS).right == 0
    assert exam.peers[0].share(TOOL_CALLS).right == 0
    assert not judged(q4, exam.exact).passes
    assert judged(k8v4, exam.exact).passes
    choice = chosen(outliers, tmp_path)
    assert choice.policy == policy_of(Rung.K8V4, "float32")
    assert "by questions: q4-rotated does not (recall" in choice.why
    assert "q4 does" not in choice.why, "plain keys are not tried where turned ones can be had"
    assert "tool calls 0 of 2, exact KV 2" in choice.why


@pytest.mark.long(6)
@pytest.mark.parametrize(("times", "rung", "extent"), [(8, Rung.Q4_ROTATED, GLANCE), (1024, Rung.FP, BRIEF)])
def test_auto_climbs_as_far_as_the_keys_demand(times: float, rung: Rung, extent: Extent, tmp_path: Path) -> None:
    subject = subject_of(write_outlier_model(tmp_path / "model", times))
    assert name_of(chosen(subject, tmp_path, extent=extent).policy) == rung.value


@pytest.mark.long(6)
@NO_CUDA
def test_another_s_four_bits_are_as_far_from_exact_kv_as_ours(tiny: Subject) -> None:
    """Measured alike: the measurement is of the policy and not of our caches. (All rungs: `test_cli_measures`.)"""
    exam = examined(tiny, (Rung.Q4,), with_peers=True)
    [q4], peer = exam.rungs, exam.peers[0]
    assert q4.share(RECALL).right == exam.exact.share(RECALL).n
    assert (exam.exact.kl, exam.exact.top1) == (0.0, 1.0)
    assert peer.name == "mlx-lm q4"
    assert 0.7 < peer.kl / q4.kl < 1.4
    assert q4.bytes_per_token == 8 * 2 * 2 * (64 // 2 + 4)


@pytest.mark.long(5)
def test_a_model_that_cannot_be_asked_sings_the_canary(model_dir: Path, tmp_path: Path) -> None:
    """Random weights with the world's tokenizer answer nothing: held to their likeliest next tokens, they need more
    than four bits."""
    subject = subject_of(model_dir)
    exam = examined(subject, (Rung.Q4, Rung.FP))
    assert subject.read_conversations() is not None
    assert exam.material == CANARY
    assert RECALL not in exam.exact.shares
    assert not judged(exam.rungs[0], exam.exact).passes
    assert judged(exam.rungs[-1], exam.exact).passes
    choice = chosen(subject, tmp_path)
    assert choice.policy.key_bits > 4
    assert "top-1 agreement" in choice.why


@pytest.mark.parametrize("family", [GEMMA3, JAMBA], ids=lambda config: config["model_type"])
def test_a_model_with_windows_or_states_is_measured_too(family: dict[str, Any], tmp_path: Path) -> None:
    """Its memory cannot be cut back behind a question, so it sings the canary."""
    exam = examined(subject_of(write_family(tmp_path, family)), (Rung.Q4, Rung.FP))
    assert exam.material == CANARY
    q4, fp = exam.rungs
    assert q4.kl > fp.kl
    assert q4.bytes_per_token < 0.3 * fp.bytes_per_token


@pytest.mark.long(2)
def test_auto_measures_a_model_once_and_remembers_it_by_its_weights(tiny: Subject, tmp_path: Path) -> None:
    first = chosen(tiny, tmp_path, extent=BRIEF)
    assert first.policy == policy_of(Rung.Q4_ROTATED, "float32"), "it bears four bits, and gets the cheapest rung"
    assert first.why.startswith("auto: by questions: q4-rotated passes")
    file = tmp_path / FILE
    # What is written is believed: so nothing was measured.
    content = json.loads(file.read_text())
    (key,) = content["choices"]
    content["choices"][key]["rung"] = "q8"
    file.write_text(json.dumps(content))
    again = chosen(tiny, tmp_path, extent=BRIEF)
    assert again.policy == policy_of(Rung.Q8, "float32")
    assert again.why.startswith("auto, remembered: ")
    last = PolicyRequest.parse("auto", "last")
    assert chosen(tiny, tmp_path, digest="e" * 64, request=last, extent=BRIEF).policy.exact_layers == [7], (
        "another model"
    )
    assert len(json.loads(file.read_text())["choices"]) == 2
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.long(2)
def test_a_choice_that_cannot_be_written_is_still_made(tiny: Subject, tmp_path: Path) -> None:
    """And one that cannot be read is no memory."""
    in_the_way = tmp_path / "state"
    in_the_way.write_text("a file, where the directory should be")
    assert chosen(tiny, in_the_way, extent=BRIEF).policy == policy_of(Rung.Q4_ROTATED, "float32")


@pytest.mark.long(3)
def test_auto_tries_plain_keys_of_heads_that_have_no_rotation(
    tiny: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As heads do of a size that the rotation does not have."""

    def problem(_: RotatedCodec, dim: int) -> str:
        return f"heads of {dim} cannot be turned"

    monkeypatch.setattr(RotatedCodec, "problem", problem)
    choice = chosen(tiny, tmp_path, extent=BRIEF)
    assert choice.policy == policy_of(Rung.Q4, "float32")
    assert "q4-rotated cannot be had" in choice.why
    assert "heads of 64 cannot be turned" in choice.why


@pytest.mark.long(9)
def test_a_rung_that_answers_every_needle_and_loses_a_task_is_not_taken(tiny: Subject) -> None:
    """One call less than exact KV gets right, with every needle found, is too few."""
    extent = Extent((300,), recall_each=2, tools_each=2, canaries=1, canary_tokens=32, tasks=6)
    policies = {rung.value: policy_of(rung, "float32") for rung in (Rung.Q4_ROTATED, Rung.K8V4)}
    exam = examine(tiny, policies, extent, clock=time.monotonic, say=lambda _: None)
    assert set(exam.exact.tasks) == {"corrections", "summaries", "tool_arguments"}
    turned, k8v4 = exam.rungs
    for task in (RECALL, TOOL_CALLS):
        assert turned.share(task).right == exam.exact.share(task).right == exam.exact.share(task).n
    exact = exam.exact.tasks["tool_arguments"]
    assert exact.right == exact.n == turned.tasks["tool_arguments"].right
    turned.tasks["tool_arguments"] = Share(exact.right - 1, exact.n)
    assert not judged(turned, exam.exact).passes
    assert judged(turned, exam.exact).why.startswith("tool arguments")
    assert judged(k8v4, exam.exact).passes


@pytest.mark.long(3)
def test_a_model_that_repeats_is_given_the_tasks_that_ship(model_dir: Path) -> None:
    """And those are no part of its text: the canary's agreement is that of random tokens and its own text."""
    extents = [Extent((300,), 1, 1, canaries=1, canary_tokens=32, tasks=count) for count in (0, 3)]
    without, with_tasks = (
        examine(
            subject_of(model_dir),
            {"q4": policy_of(Rung.Q4, "float32")},
            extent,
            clock=time.monotonic,
            say=lambda _: None,
        )
        for extent in extents
    )
    assert {name: share.n for name, share in with_tasks.exact.tasks.items()} == {
        "chained_arithmetic": 1,
        "code_edits": 1,
        "tool_arguments": 1,
    }
    assert (without.rungs[0].positions, without.rungs[0].kl) == (with_tasks.rungs[0].positions, with_tasks.rungs[0].kl)
    assert "chained" not in judged(with_tasks.rungs[0], with_tasks.exact).why, "exact KV does none of them"


@pytest.mark.long(3)
def test_the_exam_stops_between_texts_when_its_time_is_over(tiny: Subject) -> None:
    extent = Extent((300, 600, 2000), 1, 1, canaries=1, canary_tokens=32)
    now = iter(range(0, 10**6, 10))
    policies = {"q4": policy_of(Rung.Q4, "float32")}
    said: list[str] = []
    exam = examine(tiny, policies, extent, clock=lambda: float(next(now)), say=said.append, time_limit_s=60.0)
    assert exam.material == QUESTIONS
    assert exam.is_cut_short
    assert len(said) in (1, 2)
    assert exam.exact.positions == exam.rungs[0].positions > 0


@pytest.mark.long(2)
def test_asking_leaves_what_was_read_as_it_was(tiny: Subject) -> None:
    """Or the second question would be put behind the first."""
    conversations = Conversations.read(kvasir_tiny.conversations_path())
    sheet = next(conversation_sheets(conversations, tiny.tokenizer, GLANCE))
    way, made = policy_way(tiny.runner, "q4", policy_of(Rung.Q4, "float32")), []

    def new_caches() -> Caches:
        made.append(way.new_caches())
        return made[-1]

    Meter(tiny.runner, time.monotonic).measure(sheet, exact_way(tiny.runner), [Way(way.found, new_caches)])
    assert len(sheet.questions) == 4
    assert [caches.length for caches in made if isinstance(caches, SequenceKV)] == [len(sheet.ids)]
    assert way.found.share(TOOL_CALLS).right == 2
