"""What a model's generation_config.json gives to requests that leave a setting out."""

import json
from pathlib import Path
from typing import Any

import pytest

from inference_svc.model.loading import sampling_defaults


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repetition_penalty": 1.05, "do_sample": True},)
        * 2,
        ({"temperature": 0.6, "do_sample": False}, {}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"temperature": 0.7, "eos_token_id": [1, 2]}, {"temperature": 0.7}),
        ({"bos_token_id": 1, "_from_model_config": True}, {}),
        ({"temperature": 3, "top_p": 0, "top_k": -1, "min_p": True, "repetition_penalty": "1"}, {}),
        ({"temperature": float("nan"), "top_k": 1.5, "top_p": None}, {}),
        ([], {}),
    ],
)
def test_only_settings_that_a_request_could_ask_for_are_taken(
    given: Any, found: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    given_too = {name: value for name, value in found.items() if name != "do_sample"}
    assert sampling_defaults(tmp_path) == given_too


def test_a_model_without_the_file_or_with_a_broken_one_has_none(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text("{")
    assert sampling_defaults(tmp_path) == {}
