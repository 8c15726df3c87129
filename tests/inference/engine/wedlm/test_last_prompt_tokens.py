"""A prompt's last token that alone has no KV is a row of the next pass over windows, and nothing but time tells."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from kvasir.errors import Cancelled

from inference_svc.engine import engine
from inference_svc.engine.api import Hot, Preempted, Prefilled, Priority, Resumed, Tokens
from inference_svc.engine.sequence import Sequence as Turn
from inference_svc.kv.batch import decoded_layer
from inference_svc.kv.batch.decode_batch import DecodeBatch
from inference_svc.kv.batch.decode_step import PassRows
from inference_svc.model.model_runner import ModelRunner
from tests.inference.engine.drafts.many_drafts import reported
from tests.inference.engine.driving import Driver, Listener, tokens_of
from tests.inference.engine.turns.test_preempted_turns import Keeper
from tests.inference.engine.wedlm.test_mask_turns import KINDS, POLICIES, TOKENS, drawn, open_engine, reference
from tests.inference.engine.wedlm.tiny_wedlm import plain_model, write_wedlm
from tests.made_models.sampling import first_and_in_turn

MODELS: dict[str, dict[str, Any]] = {
    "in order": {"wedlm_next_token": True, "wedlm_left_to_right": True},
    "masked": {},
    "next": {"wedlm_next_token": True},
}
BEHIND_BORDER = 257  # tokens of a prompt whose last one begins a block, and so a cell
of_each_model = pytest.mark.parametrize("served", first_and_in_turn([*MODELS], seconds=3), indirect=True)
SUMS = pytest.mark.cpu_only("a GPU's sums depend on how many rows a pass has")


class Served(NamedTuple):
    driver: Driver
    directory: Path

    def lacking(self, prompt: Sequence[int], gap: int = 1) -> Any:
        """A new agent that remembers the prompt but for so many tokens, all of it computed in cells."""
        key = self.driver.key()
        self.driver.turn(prompt[:-gap], key=key, max_tokens=0)
        return key

    def begun(self, key: Any, prompt: Sequence[int], gap: int = 1, **how: Any) -> Listener:
        return self.driver.submit(prompt, Hot(len(prompt) - gap), key=key, **{"max_tokens": TOKENS, **how})


class InCells(Turn):
    """A turn whose last prompt token has a cell of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._decodes_from = self.cells.prompt_tokens


class Computed(NamedTuple):
    cells: list[int]  # tokens of each
    passes: list[list[PassRows]]


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Stored in 16 bits, which most differences of rounding change; 4 hide them."""
    directory = write_wedlm(tmp_path_factory.mktemp("model"), **MODELS[request.param])
    driver = Driver(open_engine(directory, tmp_path_factory.mktemp("cache"), POLICIES["exact"]))
    yield Served(driver, directory)
    driver.engine.close()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Computed:
    """What engines compute meanwhile."""
    found = Computed([], [])
    last_logits, prefill, pass_of = ModelRunner.last_logits, ModelRunner.prefill, DecodeBatch.pass_of

    def last(self: ModelRunner, kv: Any, token_ids: Sequence[int], *args: Any) -> Any:
        found.cells.append(len(token_ids))
        return last_logits(self, kv, token_ids, *args)

    def other(self: ModelRunner, kv: Any, token_ids: Sequence[int], *args: Any) -> Any:
        found.cells.append(len(token_ids))
        return prefill(self, kv, token_ids, *args)

    def passed(self: DecodeBatch, token_ids: Sequence[int], given: Sequence[PassRows]) -> Any:
        found.passes.append([each for each in given if each.count])
        return pass_of(self, token_ids, given)

    monkeypatch.setattr(ModelRunner, "last_logits", last)
    monkeypatch.setattr(ModelRunner, "prefill", other)
    monkeypatch.setattr(DecodeBatch, "pass_of", passed)
    return found


def outcome(driver: Driver, listener: Listener, key: Any) -> tuple[object, ...]:
    ended = listener.end()
    progress = [event for event in listener.events if isinstance(event, Prefilled)]
    return reported(listener), progress, ended.mask_passes, ended.cached_tokens, ended.state, driver.files(key)


@pytest.mark.long(16)
@SUMS
@of_each_model
@pytest.mark.parametrize(("length", "sums_alike"), [(5, True), (BEHIND_BORDER, True), (411, False)])
def test_a_turn_is_to_the_bit_that_of_a_cell_for_its_last_prompt_token(
    served: Served, length: int, sums_alike: bool, computed: Computed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replies, their log probabilities, the counts, and all stored bits; also on a CPU that sums each row apart."""
    if not sums_alike:
        monkeypatch.setattr(decoded_layer, "sums_windows_alike", lambda *_: False)
    driver, prompt = served.driver, tokens_of(length, length)
    base = served.lacking(prompt)

    def found() -> tuple[object, ...]:
        computed.cells.clear()
        before, keys = driver.engine.computed_tokens, [driver.fork(base) for _ in KINDS]
        outcomes = [
            outcome(driver, served.begun(key, prompt, **{"logprobs": 1, **how}), key)
            for key, how in zip(keys, KINDS, strict=True)
        ]
        return *outcomes, driver.engine.computed_tokens - before

    now, cells = found(), list(computed.cells)
    monkeypatch.setattr(engine, "Sequence", InCells)
    assert now == found()
    assert (cells, computed.cells) == ([], [1] * len(KINDS))


@pytest.mark.long(2)
@of_each_model
def test_only_a_gap_of_one_token_behind_others_needs_no_cell(served: Served, computed: Computed) -> None:
    driver, edge = served.driver, served.driver.engine.model.cell_tokens
    for length, gap, cells in ((40, 1, []), (40, 2, [2]), (40, 3, [3]), (2, 1, []), (edge + 9, 9, [9])):
        prompt = tokens_of(length, 1)
        key = served.lacking(prompt, gap)
        computed.cells.clear()
        served.begun(key, prompt, gap).end()
        assert computed.cells == cells
    for length, cells in ((1, [1]), (2, [2]), (edge, [edge]), (edge + 1, [edge]), (edge + 2, [edge, 2])):
        computed.cells.clear()
        driver.turn(tokens_of(length, 2), max_tokens=2)
        assert computed.cells == cells
    prompt = tokens_of(30, 3)
    key = served.lacking(prompt)
    computed.cells.clear()
    driver.turn(prompt, Hot(29), key=key, max_tokens=0)
    assert computed.cells == [1], "a turn that generates nothing decodes nothing"


@pytest.mark.long(2)
@of_each_model
def test_a_reply_does_not_depend_on_how_much_of_its_prompt_was_there(served: Served) -> None:
    driver = served.driver
    for length in (5, BEHIND_BORDER):
        prompt = tokens_of(length, length + 1)
        cold = driver.submit(prompt, max_tokens=TOKENS)
        expected = reference(driver, plain_model(served.directory)).generate(prompt, TOKENS)
        found = [drawn(served.begun(served.lacking(prompt, gap), prompt, gap)) for gap in (1, 2)]
        assert found == [drawn(cold)] * 2
        assert drawn(cold) == expected[: len(drawn(cold))]


@pytest.mark.long(2)
@of_each_model
def test_turns_of_one_new_token_each_are_those_of_the_reference(served: Served) -> None:
    driver, model = served.driver, plain_model(served.directory)
    prompt = tokens_of(250, 7)
    key, text = served.lacking(prompt), prompt
    for turn in range(3):
        expected = reference(driver, model).generate(text, TOKENS)
        listener = served.begun(key, text)
        assert drawn(listener) == expected[: len(drawn(listener))]
        text = (*listener.end().state.token_ids, *tokens_of(1, turn))


def all_at_once(served: Served, first: Listener, begin: Sequence[Any]) -> list[Listener]:
    """Submit turns between two steps of a long one, so that all begin in the same step."""
    begun: list[Listener] = []
    first.at(Tokens, 2, lambda: begun.extend(each() for each in begin))
    served.driver.submit(tokens_of(60, 5), listener=first, max_tokens=60)
    first.end()
    return begun


@of_each_model
def test_eight_turns_that_begin_together_have_their_last_prompt_tokens_in_one_pass(
    served: Served, computed: Computed
) -> None:
    prompts = [tokens_of(40 + seed, seed) for seed in range(8)]
    keys = [served.lacking(prompt) for prompt in prompts]
    computed.cells.clear()
    turns = list(zip(keys, prompts, strict=True))
    begun = all_at_once(served, Listener(), [lambda turn=turn: served.begun(*turn) for turn in turns])
    assert [each.end().completion_tokens for each in begun] == [TOKENS] * 8
    assert computed.cells == [60]
    ending = [[row.is_first_alone for row in rows] for rows in computed.passes]
    assert [sum(rows) for rows in ending if any(rows)] == [8]
    assert max(len(rows) for rows in ending) == 9, "beside the window of the turn that was there"


@pytest.mark.long(4)
@SUMS
@of_each_model
def test_such_turns_are_beside_all_others_what_they_are_alone(served: Served) -> None:
    """Beside windows, prompts in cells, forks of one memory, a turn that is cancelled in mid-window and one that keeps
    its part."""
    driver = served.driver
    prompts = [tokens_of(length, length + 2) for length in (5, 257, 30, 300, 140, 99)]
    bases = [served.lacking(prompt) for prompt in prompts]

    def begin(place: int, **how: Any) -> tuple[Any, Listener]:
        key = driver.fork(bases[place])
        return key, served.begun(key, prompts[place], **{**KINDS[place], **how})

    def cold(seed: int) -> tuple[Any, Listener]:
        key = driver.key()
        return key, driver.submit(tokens_of(310, seed), key=key, max_tokens=TOKENS)

    def cut(place: int, *, keeps: bool) -> tuple[Any, Listener]:
        key, listener = driver.fork(bases[place]), Listener().cancel_at(Tokens, 3)
        return key, served.begun(key, prompts[place], listener=listener, keep_partial=keeps)

    kinds = [lambda place=place: begin(place) for place in range(len(KINDS))]
    others = [lambda: cold(8), lambda: cut(4, keeps=True), lambda: begin(2)]
    alone = [outcome(driver, listener, key) for key, listener in (each() for each in [*kinds, *others])]
    together = [each() for each in [*kinds, lambda: cut(3, keeps=False), *others]]
    with pytest.raises(Cancelled):
        together.pop(len(kinds))[1].end()
    found = [outcome(driver, listener, key) for key, listener in together]
    assert found == alone
    again = driver.fork(bases[3])
    assert outcome(driver, served.begun(again, prompts[3], **KINDS[3]), again) == alone[3], "after a cancel"


@pytest.mark.long(19)
@pytest.mark.parametrize("served", MODELS, indirect=True)
@pytest.mark.parametrize(("at", "brought"), [(1, "all"), (3, "all"), pytest.param(3, "nothing", marks=SUMS)])
def test_such_a_turn_goes_on_to_the_bit_after_a_preemption_and_in_another_process(
    served: Served, tmp_path: Path, at: int, brought: str
) -> None:
    """Also where all its KV is computed again, the prompt's last token beside the reply's."""
    unit = open_engine(served.directory, tmp_path, POLICIES["exact"], budget_bytes=1 << 20)
    budget_bytes = 800 * unit.model.kv_bytes_per_token
    unit.close()
    prompt, settings = tokens_of(BEHIND_BORDER, 12), {"max_tokens": 48, "temperature": 0.8, "seed": 3, "logprobs": 1}
    key = served.lacking(prompt)
    undisturbed, restored = served.driver.fork(key), served.driver.restored(key)
    expected = outcome(served.driver, served.begun(undisturbed, prompt, **settings), undisturbed)
    ending = Driver(open_engine(served.directory, tmp_path, POLICIES["exact"]))
    cut = Listener()
    ending.submit(prompt, restored, key=ending.key(), listener=cut, **settings)
    cut.wait_for(Tokens, at)
    ending.engine.close()  # in mid-window: what it had remembered before is restored elsewhere
    driver = Driver(open_engine(served.directory, tmp_path, POLICIES["exact"], budget_bytes=budget_bytes))
    try:
        keeper, people, other = Keeper(lambda kept: kept if brought == "all" else ()), list[Listener](), driver.key()
        keeper.at(Tokens, at, lambda: people.append(driver.submit(tokens_of(520, 13), max_tokens=2)))
        how: dict[str, Any] = {"priority": Priority.BACKGROUND, "can_be_preempted": True}
        driver.submit(prompt, restored, key=other, listener=keeper, **settings, **how).end()
        assert [each.end().completion_tokens for each in people] == [2]
        assert keeper.count(Preempted) == 1
        assert (keeper.one(Resumed).lost_tokens >= BEHIND_BORDER) == (brought == "nothing")
        found = outcome(driver, keeper, other)
        if brought == "nothing":  # rows that are computed again count twice
            found, expected = (each[:1] + each[3:] for each in (found, expected))
        assert found == expected
    finally:
        driver.engine.close()
