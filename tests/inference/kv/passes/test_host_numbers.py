"""Arrays of the host's numbers are used again only when the device is through with them and nobody holds them."""

import sys

import mlx.core as mx
import pytest

from inference_svc.kv import host_numbers
from inference_svc.kv.host_numbers import HostNumbers


@pytest.fixture
def numbers() -> HostNumbers:
    return HostNumbers(is_reused=True)


def test_an_array_is_used_again_once_its_use_is_completed(numbers: HostNumbers) -> None:
    first = id(numbers.of([1, 2, 3, 4]))
    second = numbers.of([5, 6, 7, 8], 2, 2)
    assert second.tolist() == [[5, 6], [7, 8]]
    assert id(numbers.of([9, 9, 9, 9])) != first, "the device may still read it"
    numbers.completed(1)
    third = numbers.of([10, 20, 30, 40])
    assert (id(third), third.tolist()) == (first, [10, 20, 30, 40])
    assert id(numbers.of([1] * 4, dtype=mx.uint32)) not in (first, id(second))


def test_an_enqueued_sum_keeps_its_numbers(numbers: HostNumbers) -> None:
    """Each sum was enqueued before the next numbers were written."""
    results = []
    for step in range(50):
        total = numbers.of([step] * 1_000).sum()
        mx.async_eval(total)  # type: ignore[no-untyped-call]
        results.append((total, numbers.uses))
        if len(results) > 2:
            before, uses = results[-3]
            mx.eval(before)
            numbers.completed(uses)
    assert [total.item() for total, _ in results] == [1_000 * step for step in range(50)]
    assert sum(map(len, numbers._slots.values())) <= 4


def test_an_array_that_is_held_is_not_written_and_counts_as_used_when_it_was_last(numbers: HostNumbers) -> None:
    kept = numbers.of([1, 2, 3])
    numbers.completed(numbers.uses)
    assert numbers.of([4, 5, 6]) is not kept
    assert numbers.again(kept).tolist() == [1, 2, 3]
    last, place = numbers.uses, id(kept)
    numbers.completed(last - 1)
    del kept
    assert id(numbers.of([7, 8, 9])) != place
    numbers.completed(last)
    assert place in {id(numbers.of([each] * 3)) for each in range(2)}


def test_arrays_are_used_again_by_an_interpreter_that_lends_variables(
    numbers: HostNumbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python 3.14 does: a call's argument that is a variable counts once less. No array was used again there."""

    class Lending:
        @staticmethod
        def getrefcount(array: mx.array) -> int:
            count = sys.getrefcount(array)
            return count - any(each is array for each in sys._getframe(1).f_locals.values())

    monkeypatch.setattr(host_numbers, "sys", Lending)
    first = id(numbers.of([1, 2, 3]))
    numbers.completed(numbers.uses)
    assert id(numbers.of([4, 5, 6])) == first


def test_small_arrays_and_those_of_other_devices_are_new_ones() -> None:
    small, plain = HostNumbers(is_reused=True), HostNumbers(is_reused=False)
    assert small.of([1, 2]).tolist() == [1, 2]
    assert plain.of([1, 2, 3, 4], 2, 2, dtype=mx.uint32).tolist() == [[1, 2], [3, 4]]
    assert not small._slots
    assert not plain._slots
