"""gpt-oss's calls, which mlx-lm has no parser for: forced by a grammar, ended by their own token, read and kept hot."""

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import FailedPrecondition

from inference_svc.engine.api import SamplingParams
from inference_svc.engine.sampling import Drawn, Draws, Sampler
from inference_svc.formats.constraint import Constraint, ConstraintKind
from inference_svc.formats.grammars import Grammars
from inference_svc.model.prompting import Prompting
from inference_svc.text.conversation import dialogue, render
from inference_svc.text.given_json import GivenJson
from inference_svc.text.replies.remembered_reply import Said, reply_message
from inference_svc.text.token_text import TokenText
from tests.inference.formats.models_that_call import schemas_of
from tests.made_models.sampling import first_and_in_turn, sampled
from tests.made_models.thinking_models import write_tokenizer

SCHEMAS = schemas_of("json_tools")
ASKED = manifest_pb2.Message(role="user", content="Which?")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("harmony") / "tokenizer", "gpt-oss")


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    load: Any = mlx_lm.utils.load_tokenizer
    return load(directory)


def prompting_of(directory: Path, tokenizer: Any) -> Prompting:
    text = TokenText.of_tokenizer((directory / "tokenizer.json").read_text(), tokenizer.decode)
    return Prompting(tokenizer, text)


def constraint(name: str, kind: ConstraintKind = ConstraintKind.TOOL_CHOICE) -> Constraint:
    tools = [{"place": 0, "name": name, "parameters": json.dumps(SCHEMAS[name])}]
    return Constraint(kind, json.dumps({"one_call": False, "tools": tools}))


def drawn(grammars: Grammars, wanted: Constraint, size: int, stops: set[int], seed: int) -> list[int]:
    chance, ids = np.random.default_rng(seed), list[int]()
    sampler = Sampler(SamplingParams(1500, temperature=1.0, seed=seed), (), grammars.matcher("tests", wanted))
    while not ids or ids[-1] not in stops:
        assert len(ids) < 1500
        logits = mx.array(chance.normal(scale=3, size=(1, size)).astype(np.float32))
        (one,) = Draws([sampler], logits).read()
        assert isinstance(one, Drawn), one
        ids.append(one.token_id)
    return ids


@pytest.mark.parametrize(
    "is_stop", first_and_in_turn([True, False], seconds=1), ids=["its token ends replies", "it does not"]
)
def test_random_logits_make_one_call_that_fits_and_is_remembered_as_one(
    directory: Path, tokenizer: Any, is_stop: bool
) -> None:
    vocabulary = tokenizer.get_vocab()
    size, call, returned = max(vocabulary.values()) + 1, vocabulary["<|call|>"], vocabulary["<|return|>"]
    stops = {call, returned} if is_stop else {returned}
    grammars = Grammars.of_tokenizer(tokenizer, size, stops)
    prompting = prompting_of(directory, tokenizer)
    for case in range(sampled(13, of=1000)):
        name = sorted(SCHEMAS)[case % len(SCHEMAS)]
        ids = drawn(grammars, constraint(name), size, stops, case)
        if not is_stop:
            assert ids.pop() == returned
        assert ids.pop() == call
        text, end = tokenizer.decode(ids), "<|call|>"
        reader = prompting.reader("<|start|>assistant", [], "r", begins_with=prompting.tool_start)
        part = reader.whole(text, end) if is_stop else reader.whole(text + end, "<|return|>")
        (called,) = reader.calls
        assert (part.answer, part.reasoning, called.name) == ("", "", name)
        jsonschema_rs.validate(SCHEMAS[name], json.loads(called.arguments_json))


def test_a_call_is_remembered_as_one_that_the_template_writes_again(directory: Path, tokenizer: Any) -> None:
    prompting = prompting_of(directory, tokenizer)
    asked = dialogue([ASKED], (), GivenJson(), prompting.specials)
    prompt = render(prompting.template, asked)
    text = ' to=functions.city<|channel|>commentary json<|message|>{"city": "O"}'
    reader = prompting.reader(prompt, [], "r", begins_with=prompting.tool_start)
    reader.whole(text, "<|call|>")
    kept = reply_message(
        prompting.template,
        asked,
        said=Said(text, reader.calls),
        rendered_text=prompt + text + "<|call|>",
        tool_start=prompting.tool_start,
    )
    assert [call.name for call in kept.tool_calls] == ["city"]


def test_calls_where_the_model_decides_cannot_be_bound(tokenizer: Any) -> None:
    grammars = Grammars.of_tokenizer(tokenizer, len(tokenizer.get_vocab()), [2])
    for kind in (ConstraintKind.CALLS_IN_TEXT, ConstraintKind.CALLS_OR_FORMAT):
        with pytest.raises(FailedPrecondition) as refused:
            grammars.in_letters(constraint("city", kind))
        assert refused.value.reason == "NO_FORCED_CALLS"
