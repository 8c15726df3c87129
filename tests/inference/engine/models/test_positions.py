"""A word stands at its own position, whoever else is decoded and whenever they came."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from inference_svc.engine.api import Tokens
from tests.inference.engine.driving import Driver, Listener, tokens_of

# What was decoded rounds differently than what was prefilled, which may turn a code; at another position most differ.
UNLIKE_AT_MOST = 0.02
GOES_ON = ((0, -1000.0),)  # its end token is never drawn


def unlike(one: Sequence[bytes], other: Sequence[bytes]) -> float:
    """The part of the bytes of two memories' tensors that differs."""
    assert [len(data) for data in one] == [len(data) for data in other]
    parts = [np.frombuffer(a, np.uint8) != np.frombuffer(b, np.uint8) for a, b in zip(one, other, strict=True)]
    return float(np.concatenate(parts).mean())


@pytest.mark.long(2)
def test_what_is_decoded_in_a_batch_stands_where_a_prefill_puts_it(driver: Driver) -> None:
    """Offsets that change while the model holds them would turn every key a little further (LESSONS 4). Sequences of
    different lengths, each of which joins while the one before it decodes.
    """
    lengths = (240, 7, 255, 90)
    keys = [driver.key() for _ in lengths]
    listeners = [Listener() for _ in lengths]

    def begin(place: int) -> None:
        driver.submit(
            tokens_of(lengths[place], 300 + place),
            key=keys[place],
            listener=listeners[place],
            max_tokens=40,
            logit_bias=GOES_ON,
        )

    for place, (listener, _) in enumerate(pairwise(listeners)):
        listener.at(Tokens, 3 + place, lambda place=place: begin(place + 1))  # type: ignore[misc]
    begin(0)
    for key, listener in zip(keys, listeners, strict=True):
        state = listener.end().state
        again = driver.key()
        *prompt, last = state.token_ids
        driver.turn(prompt, key=again, max_tokens=1, logit_bias=((last, 1000.0),))
        assert unlike(driver.files(key), driver.files(again)) < UNLIKE_AT_MOST
