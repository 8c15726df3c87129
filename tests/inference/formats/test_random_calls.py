"""Random logits through an engine's own masks and draws: each format's calls fit. The campaign does it in services."""

import importlib
import json
import pkgutil
import random
from pathlib import Path
from typing import Any

import jsonschema_rs
import mlx.core as mx
import mlx_lm.tool_parsers
import mlx_lm.utils
import numpy as np
import pytest

from inference_svc.engine.api import SamplingParams
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.formats.call_grammars import FORMATS
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.formats.grammars import Grammars
from tests.inference.engine.tiny_models import VOCABULARY
from tests.inference.formats.models_that_call import MARKERS, schemas_of, write_model_that_calls
from tests.inference.formats.test_call_grammars import EVERY, calls_in, compiled, random_reply
from tests.made_models.sampling import sampled

_STOP, _MOST = 2, 1500


def said(grammars: Grammars, tokenizer: Any, constraint: Constraint, seed: int) -> str:
    """The reply of a model whose logits are random."""
    chance, ids = np.random.default_rng(seed), list[int]()
    matcher = grammars.matcher("tests", constraint)
    sampler = Sampler(SamplingParams(_MOST, temperature=1.0, seed=seed), (), matcher)
    while len(ids) < _MOST:
        logits = mx.array(chance.normal(scale=3, size=(1, VOCABULARY + 16)).astype(np.float32))
        (drawn,) = Draws([sampler], logits).read()
        assert isinstance(drawn, Drawn), drawn
        if drawn.token_id == _STOP:
            break
        ids.append(drawn.token_id)
    return str(tokenizer.decode(ids))


def test_every_parser_of_mlx_lms_has_a_grammar_and_a_model_that_calls() -> None:
    parsers = {module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__)}
    assert set(MARKERS) == set(FORMATS) == parsers


@pytest.mark.long(4)
@EVERY
def test_random_logits_call_one_tool_with_arguments_that_fit(name: str, tmp_path: Path) -> None:
    load: Any = mlx_lm.utils.load_tokenizer
    tokenizer = load(write_model_that_calls(tmp_path / "model", name))
    assert tokenizer.tool_parser is importlib.import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call
    grammars, schemas = Grammars.of_tokenizer(tokenizer, VOCABULARY + 16, [_STOP]), schemas_of(name)
    for case in range(sampled(2, of=1000)):
        names = random.Random(f"{name} {case}").sample(sorted(schemas), 3)
        tools = [
            {"place": place, "name": each, "parameters": json.dumps(schemas[each])} for place, each in enumerate(names)
        ]
        text = json.dumps({"one_call": True, "tools": tools})
        reply = said(grammars, tokenizer, Constraint(ConstraintKind.TOOL_CHOICE, text), case)
        offered = [{"name": each, "parameters": schemas[each]} for each in names]
        (call,) = calls_in(name, reply, offered)
        assert call["name"] in names
        jsonschema_rs.validate(schemas[call["name"]], call["arguments"])


@pytest.mark.long(2)
@pytest.mark.parametrize("schema", [{}, {"properties": {"a": {"type": "string", "maxLength": 3}}}])
@EVERY
def test_a_call_may_have_no_arguments(name: str, schema: dict[str, Any]) -> None:
    """Some parsers read a call without any in a form of its own."""
    tools = [{"place": 0, "name": "f", "parameters": schema}]
    matcher = compiled(name, tools, one_call=True)
    replies = [calls_in(name, random_reply(matcher, random.Random(case)), tools) for case in range(12)]
    assert all(len(calls) == 1 for calls in replies)
    assert any(not calls[0]["arguments"] for calls in replies)
