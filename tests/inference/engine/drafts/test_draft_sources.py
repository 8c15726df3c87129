"""Drafts come from a turn's own text and from texts that its namespace has in memory, and from nowhere else."""

import ast
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm.models
import pytest
from mlx_lm.models import exaone_moe

from inference_svc.config import EngineSettings
from inference_svc.engine.api import AgentKey, Ended
from inference_svc.engine.drafting import drafter
from inference_svc.engine.engine import Engine
from inference_svc.engine.sampling import Sampler
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.model_opening import _engine_options
from tests.inference.engine.drafts.planted_drafts import every_draft
from tests.inference.engine.driving import Driver, tokens_of

FILE = 'def wait_for(door, code):\n    """Opens once."""\n    return door.lock.try_code(code, patience_s=48.2)\n'
TOOL = {
    "name": "replace_lines_of_file",
    "description": "Replaces lines.",
    "parameters": {
        "type": "object",
        "properties": {"path_of_the_file": {"type": "string"}, "first_line": {"type": "integer"}},
        "required": ["path_of_the_file", "first_line"],
    },
}


@pytest.fixture(autouse=True)
def _every_draft_of_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    """A format decides the reply of a random model, and the tokens that it forces are not tried."""
    monkeypatch.setattr(drafter.DraftCosts, "lengths", every_draft)
    monkeypatch.setattr(Sampler, "forced", lambda *_: ())


def forced_to(text: str, **how: Any) -> dict[str, Any]:
    return {"constraint": Constraint(ConstraintKind.REGEX, re.escape(text)), "max_tokens": 200, **how}


def words(seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz", k=60))


@pytest.mark.long(3)
@pytest.mark.parametrize(
    "said",
    [
        f"Here it is:\n{FILE}",
        '{"name": "replace_lines_of_file", "arguments": {"path_of_the_file": "a", "first_line": 1}}',
    ],
    ids=["a file of this turn", "a tool's name and arguments"],
)
def test_the_first_reply_is_drafted_from_the_turns_files_and_tools(driver: Driver, said: str) -> None:
    template: Any = driver.engine.tokenizer.apply_chat_template
    tools = [{"type": "function", "function": TOOL}]
    asked = [{"role": "user", "content": f"Give me the file:\n{FILE}"}]
    text = template(asked, tools=tools, tokenize=False, add_generation_prompt=True)
    prompt = driver.engine.tokenizer.encode(text, add_special_tokens=False)
    tried = driver.turn(prompt, **forced_to(said))
    plain = driver.turn(prompt, most_drafts=0, **forced_to(said))
    assert tried.text == plain.text == said
    assert tried.accepted_draft_tokens > tried.completion_tokens / 4
    elsewhere = driver.turn(tokens_of(len(prompt)), **forced_to(said))
    assert elsewhere.accepted_draft_tokens < tried.accepted_draft_tokens / 4


def said_by(driver: Driver, agent: str, text: str, namespace: str | None, **how: Any) -> Ended:
    """A turn of an agent, with a prompt of its own."""
    prompt = tokens_of(40, seed=ord(agent[0]))
    return driver.turn(prompt, key=AgentKey(namespace or "", agent), namespace=namespace, **forced_to(text, **how))


@pytest.mark.long(2)
@pytest.mark.batch_as_alone
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "seed": 3, "logprobs": 1}], ids=["greedy", "sampled"])
def test_another_agents_reply_is_tried_and_changes_nothing(driver: Driver, how: dict[str, Any]) -> None:
    text = words(len(how))
    first = said_by(driver, "a", text, "task", **how)
    plain = said_by(driver, "b", text, "alone", most_drafts=0, **how)
    tried = said_by(driver, "b", text, "task", **how)
    assert first.accepted_draft_tokens == 0
    assert tried.accepted_draft_tokens > tried.completion_tokens / 2
    assert tried.state == plain.state
    assert driver.files(AgentKey("task", "b")) == driver.files(AgentKey("alone", "b"))


def test_no_other_namespace_and_no_turn_without_one_sees_it(driver: Driver) -> None:
    text = words(11)
    said_by(driver, "theirs", text, "theirs")
    assert said_by(driver, "ours", text, "ours").drafted_tokens == 0
    assert said_by(driver, "nobody", text, None).drafted_tokens == 0
    assert said_by(driver, "sibling", text, "theirs").accepted_draft_tokens


def test_with_an_agents_memory_its_text_goes(driver: Driver) -> None:
    text = words(12)
    said_by(driver, "a", text, "gone")
    assert driver.engine.memories.drop(AgentKey("gone", "a")).result(60)
    assert said_by(driver, "b", text, "gone").drafted_tokens == 0


@pytest.fixture
def of_the_turn(model_dir: Path, tmp_path: Path) -> Iterator[Driver]:
    settings = EngineSettings(listen="unix:/nowhere", state_dir=tmp_path, drafts_from="turn")
    options = _engine_options(settings)
    options["drafts"] = replace(options["drafts"], most=16)  # on a GPU, too
    engine = Engine.open(model_dir, memory_budget_bytes=64 << 20, **options)
    yield Driver(engine)
    engine.close()


def test_an_operator_leaves_others_texts_out(of_the_turn: Driver) -> None:
    text = words(13)
    for agent in ("a", "b"):
        assert said_by(of_the_turn, agent, text, "task").drafted_tokens == 0
    assert said_by(of_the_turn, "c", text[:30] * 2, "task").accepted_draft_tokens


@pytest.mark.long(2)
def test_no_model_of_mlx_lm_keeps_heads_for_several_tokens() -> None:
    """Checkpoints that have them lose them in `sanitize`. Once a model keeps some, drafts may come from them."""
    kept = [
        f"{path.name}: {name}"
        for path in sorted(Path(str(mlx_lm.models.__file__)).parent.glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        for name in heads_of(node)
    ]
    assert kept == []
    weights = {"mtp.fc.weight": mx.zeros((2, 2)), "model.norm.weight": mx.zeros((2,))}
    sanitized = exaone_moe.Model.sanitize(
        SimpleNamespace(args=SimpleNamespace(num_hidden_layers=0, tie_word_embeddings=False)), weights
    )
    assert not any("mtp" in name for name in sanitized)


def heads_of(node: ast.AST) -> list[str]:
    """Modules of a model that the node makes, and whose name is one of such heads."""
    if isinstance(node, ast.ClassDef):
        names = [node.name]
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call | ast.List | ast.ListComp):
        names = [each.attr for each in node.targets if isinstance(each, ast.Attribute)]
    else:
        names = []
    return [name for name in names if re.search("mtp|nextn|eagle|medusa", name, re.IGNORECASE)]
