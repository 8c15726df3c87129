"""A model's tokenizer is read while its weights come: of 128,256 tokens each takes a second or two."""

import threading
from typing import Any

import mlx_lm.utils
import pytest

from inference_svc.model import kvasir_tiny, loading
from inference_svc.model.weights.placing import Placement, place_weights


def test_the_tokenizer_is_begun_before_the_weights_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, load_tokenizer = threading.Event(), mlx_lm.utils.load_tokenizer

    def read(*given: Any, **named: Any) -> Any:
        begun.set()
        plain: Any = load_tokenizer
        return plain(*given, **named)

    def placed(*given: Any, **named: Any) -> Placement:
        assert begun.wait(5)
        return place_weights(*given, **named)

    monkeypatch.setattr(mlx_lm.utils, "load_tokenizer", read)
    monkeypatch.setattr(loading, "place_weights", placed)
    assert loading.load(kvasir_tiny.path(), None).tokenizer.eos_token_ids
