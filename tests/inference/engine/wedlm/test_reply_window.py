"""Which tokens of a window are kept and committed: what holds of any entropies, in any order."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference_svc.engine.wedlm.reply_window import ReplyWindow, sure_places
from inference_svc.model.wedlm import LARGEST_WINDOW, MaskWindow

ENTROPIES = st.dictionaries(st.integers(0, 31), st.floats(0, 8), min_size=1)
SETTINGS = st.builds(MaskWindow, st.just(0), st.just(16), st.floats(0, 3), st.floats(0, 0.5))
SIZES = st.integers(4, 32)


@given(ENTROPIES, SETTINGS)
def test_all_sure_places_are_chosen_and_one_at_least(entropies: Mapping[int, float], settings: MaskWindow) -> None:
    threshold, penalty = settings.entropy_threshold, settings.position_penalty
    chosen = sure_places(entropies, settings)
    below = {place for place, entropy in entropies.items() if entropy + penalty * place < threshold}
    assert set(chosen) == below if below else len(chosen) == 1
    left_out = [entropies[place] + penalty * place for place in entropies.keys() - set(chosen)]
    assert max(entropies[place] + penalty * place for place in chosen) <= min(left_out, default=float("inf"))


def test_a_place_further_away_must_be_surer_and_the_nearest_of_equal_ones_is_chosen() -> None:
    window = MaskWindow(0, 16, 0.3, 0.01)
    assert sure_places({0: 0.25, 2: 0.20, 5: 0.15}, window) == [0, 2, 5]
    assert sure_places({0: 0.29, 9: 0.22}, window) == [0]
    assert sure_places({7: 0.3, 0: 0.3}, replace(window, position_penalty=0.0)) == [0]
    assert sure_places({4: 0.9, 1: 1.0, 0: 0.96}, window) == [4]
    assert sure_places({4: 0.9, 1: 1.0, 0: 0.9}, window) == [0]


def test_from_left_to_right_the_first_unsure_place_ends_a_pass_and_the_next_window_is_shorter() -> None:
    window = MaskWindow(0, 16, 0.3, 0.01, left_to_right=True)
    assert sure_places({0: 0.1, 1: 0.28, 2: 0.29, 3: 0.1}, window) == [0, 1]
    assert sure_places({0: 0.1, 1: 0.1, 2: 0.1}, window) == [0, 1, 2]
    assert sure_places({0: 2.0, 1: 0.1, 2: 0.4}, window) == [0, 1], "the next token is always kept"
    assert sure_places({0: 2.0}, window) == [0]
    assert [window.size_behind(committed) for committed in (None, 1, 12)] == [LARGEST_WINDOW, 5, 16]
    assert replace(window, left_to_right=False).size_behind(1) == LARGEST_WINDOW


@pytest.mark.long(2)
@given(SIZES, SETTINGS, st.data())
def test_a_reply_is_committed_without_a_gap_and_no_kept_token_changes(
    size: int, settings: MaskWindow, data: st.DataObject
) -> None:
    """Each token says at which place of the reply it was drawn. A pass keeps one at least, so passes are as few."""
    window, reply, limit = ReplyWindow[int](lambda _token: False), list[int](), 40
    passes = 0
    while len(reply) < limit:
        places = min(size, limit - len(reply))
        masks, kept = window.masks(places), dict(window.kept)
        assert sorted([*masks, *kept]) == list(range(places))
        assert all(token == len(reply) + place for place, token in kept.items())
        assert list(kept) == sorted(kept)
        assert 0 in masks, "what has no gap before it was committed"
        entropies = {place: data.draw(st.floats(0, 8)) for place in masks}
        sure = sure_places(entropies, settings)
        window.keep({place: len(reply) + place for place in sure})
        passes += 1
        reply += window.commit()
    assert reply == list(range(limit))
    assert passes <= limit
    assert window.kept == []


def test_behind_a_kept_end_nothing_is_kept_or_computed() -> None:
    window = ReplyWindow[str](lambda token: token == "end")
    window.keep({1: "b", 3: "end", 4: "end", 6: "x"})
    assert window.kept == [(1, "b"), (3, "end")]
    assert window.masks(8) == [0, 2]
    assert window.masks(2) == [0]
    window.keep({0: "a", 2: "end"})
    assert window.kept == [(0, "a"), (1, "b"), (2, "end")]
    assert window.commit() == ["a", "b", "end"]
    assert window.masks(3) == [0, 1, 2]
