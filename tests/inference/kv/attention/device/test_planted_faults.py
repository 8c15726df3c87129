"""Metal's text, emulated with each access watched, has no race and stays in its memory; planted faults are found."""

import re

import pytest

from inference_svc.kv.attention import fused
from inference_svc.kv.attention.kernels import Dialect
from tests.emulation.races import watching_compiler
from tests.inference.kv.attention.device.planted import PLANTED, run
from tests.inference.kv.attention.device.test_metal_text import PLANTED as PLANTED_IN_WORDS
from tests.inference.kv.attention.emulators import needs_compiler
from tests.made_models.sampling import first_and_in_turn

pytestmark = needs_compiler

KERNELS = ("split", "append", "gather", "store")
AT_EACH_COMMIT = ("no barrier behind the warps' mixes", "the next target")  # each takes a compiler a second


def found(kernel: str, name: str = "") -> str:
    """The faults of a launch, after one was planted."""
    faults: list[str] = []

    def changed(text: str) -> str:
        return PLANTED[name].planted(text) if name and f"kernel of {PLANTED[name].kernel}\n" in text else text

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.COMPILERS, Dialect.METAL, watching_compiler(faults, changed))
        run(kernel)
    return "\n".join(faults)


@pytest.mark.parametrize("kernel", first_and_in_turn(KERNELS, seconds=4))
def test_the_text_has_no_race_and_stays_within_its_memory(kernel: str) -> None:
    assert found(kernel) == ""


@pytest.mark.parametrize(
    "name", [name if name in AT_EACH_COMMIT else pytest.param(name, marks=pytest.mark.campaign) for name in PLANTED]
)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = PLANTED[name]
    assert re.search(f"{fault.kernel}: ({fault.found})", found(fault.kernel, name))


def test_fifty_faults_are_planted() -> None:
    assert len(PLANTED) + len(PLANTED_IN_WORDS) >= 50
