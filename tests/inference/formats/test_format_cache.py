"""What is kept of compiled formats: so many in all, and of every namespace some."""

from hypothesis import given
from hypothesis import strategies as st

from inference_svc.formats.grammars import FormatCache


def test_a_namespace_that_requests_many_drops_its_own() -> None:
    kept: FormatCache[int, str] = FormatCache(8)
    kept.put("b", 1, "b's")
    for key in range(100):
        kept.put("a", key, str(key))
    assert kept.get("b", 1) == "b's"
    assert kept.get("a", 1) is None
    assert kept.get("a", 99) == "99"
    assert not kept.has("b", 99)


def test_what_is_used_stays() -> None:
    kept: FormatCache[int, int] = FormatCache(4)
    for key in range(20):
        kept.put("a", key, key)
        assert kept.get("a", 0) == 0


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=80), st.integers(1, 6))
def test_never_more_than_so_many_and_the_newest_is_there(asked: list[tuple[str, int]], most: int) -> None:
    kept: FormatCache[int, int] = FormatCache(most)
    for namespace, key in asked:
        kept.put(namespace, key, key)
        assert kept.get(namespace, key) == key
        assert len(kept) <= most
        assert len(kept) == sum(kept.has(name, other) for name in "abcdef" for other in range(10))
