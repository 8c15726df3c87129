"""Metal's text, emulated with each access watched, has no race and stays in its memory; planted faults are found."""

import re
from collections.abc import Callable

import pytest

from inference_svc.kv.attention import fused
from inference_svc.kv.attention.kernels import Dialect
from tests.emulation.races import watching_compiler
from tests.inference.kv.attention.device.planted import MISPLACED, PLANTED, Fault, run, suffix
from tests.inference.kv.attention.device.test_metal_text import PLANTED as PLANTED_IN_WORDS
from tests.inference.kv.attention.emulators import needs_compiler
from tests.made_models.sampling import first_and_in_turn

pytestmark = needs_compiler

LAUNCHES = [(kernel, "q4") for kernel in ("split", "tiles", "append", "gather", "store", "window")] + [
    ("tiles", "k8v4")
]
AT_EACH_COMMIT = ("no barrier behind the warps' mixes", "the next target")  # each takes a compiler a second


def change_of(fault: Fault) -> Callable[[str], str]:
    """Plants a fault in its kernel's text."""
    return lambda text: fault.planted(text) if f"kernel of {fault.kernel}\n" in text else text


def found(kernel: str, policy: str, *planted: Fault) -> str:
    """The faults of a launch, after one was planted or none."""
    faults: list[str] = []
    changed = [change_of(fault) for fault in planted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused.COMPILERS, Dialect.METAL, watching_compiler(faults, *changed))
        run(kernel, policy)
    return "\n".join(faults)


@pytest.mark.long(26)
@pytest.mark.parametrize(("kernel", "policy"), first_and_in_turn(LAUNCHES, seconds=4))
def test_the_text_has_no_race_and_stays_within_its_memory(kernel: str, policy: str) -> None:
    assert found(kernel, policy) == ""


@pytest.mark.long(5)
@pytest.mark.parametrize(
    "name", [name if name in AT_EACH_COMMIT else pytest.param(name, marks=pytest.mark.campaign) for name in PLANTED]
)
def test_a_planted_fault_is_found(name: str) -> None:
    fault = PLANTED[name]
    assert re.search(f"{fault.kernel}: ({fault.found})", found(fault.kernel, fault.policy, fault))


@pytest.mark.campaign
@pytest.mark.parametrize("name", MISPLACED)
def test_a_fragment_that_lies_otherwise_changes_results(name: str) -> None:
    scene, errors = suffix(), list[float]()
    for changes in ([], [change_of(MISPLACED[name])]):
        target = fused.KernelTarget(Dialect.METAL, watching_compiler([], *changes))
        errors.append(scene.error(fused.fused_attention(*scene.arguments(), target)))
    assert errors[0] < 1e-3 < 0.05 < errors[1]


def test_fifty_faults_are_planted() -> None:
    assert len(PLANTED) + len(PLANTED_IN_WORDS) >= 50
