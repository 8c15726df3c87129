"""Windows of masks over pages, by emulated kernels of a GPU: token for token the reference's replies."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kvasir.errors import FailedPrecondition

from inference_svc.kv.attention import choice
from inference_svc.kv.batch import window_layer
from inference_svc.kv.policy import Rung, policy_of
from tests.inference.engine.driving import tokens_of
from tests.inference.engine.emulated import emulated_engine
from tests.inference.engine.wedlm.test_mask_turns import drawn, reference, until_end
from tests.inference.engine.wedlm.tiny_wedlm import plain_model, write_wedlm
from tests.inference.kv.attention.emulators import needs_compiler

pytestmark = needs_compiler
BUDGET = 1 << 20
TOKENS = 14
# Of stored K and V of more bits a page is larger. The emulator copies the pool for each kernel.
SERVED = (
    (policy_of(Rung.Q4, "float16"), BUDGET, False, True),
    (policy_of(Rung.Q4, "float16"), BUDGET, False, False),
    (policy_of(Rung.Q4, "float16"), BUDGET, True, True),
    (policy_of(Rung.FP, "float16"), 3 * BUDGET, False, True),
    (policy_of(Rung.Q4_ROTATED, "float16"), BUDGET, False, True),
    (policy_of(Rung.Q4_ROTATED, "float16"), BUDGET, False, False),
)
NAMES = "q4", "q4, by operations", "q4, next token", "exact", "rotated", "rotated, by operations"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wedlm(tmp_path_factory.mktemp("wedlm"))


@pytest.mark.long(25)
@pytest.mark.parametrize("served", SERVED, ids=NAMES)
def test_turns_together_over_pages_are_those_of_the_reference(
    tmp_path: Path, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first crosses a block's border. A slot is filled up behind the rows of most of them, and one is empty. By
    operations where the check of the window's kernel fails.
    """
    policy, budget, draws_next, has_kernel = served
    made, launched = window_layer.window_attention, list[Any]()
    monkeypatch.setattr(window_layer, "window_attention", lambda *given: launched.append(given) or made(*given))
    if not has_kernel:
        monkeypatch.setattr(choice, "why_wrong_windows", lambda *_: "it differs")
    directory = write_wedlm(tmp_path / "model", wedlm_next_token=draws_next)
    prompts = [tokens_of(250, 1), tokens_of(5, 2), tokens_of(30, 3)]
    options = {"memory_budget_bytes": budget, "longest_gap_s": 0, "policy": policy}
    with emulated_engine(directory, tmp_path, **options) as driver:
        failure = "" if has_kernel else "windows of masks: it differs"
        assert (driver.engine.kernels.attention, driver.engine.kernels.failure) == ("fused (CUDA)", failure)
        turns = [driver.submit(prompt, max_tokens=TOKENS) for prompt in prompts]
        found = [drawn(turn) for turn in turns]
        expected = reference(driver, plain_model(directory))
        replies = [dataclasses.replace(expected, keys=[], values=[]).generate(prompt, TOKENS) for prompt in prompts]
        assert found == [until_end(reply) for reply in replies]
        assert min(turn.end().mask_passes.passes for turn in turns) < TOKENS
        assert bool(launched) == has_kernel


def test_fixed_numbers_of_rows_are_refused(directory: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(FailedPrecondition, match="batch_invariant") as refused,
        emulated_engine(directory, tmp_path, memory_budget_bytes=BUDGET, batch_invariant=True),
    ):
        pass
    assert refused.value.field == "batch_invariant"
