"""WeDLM models (Tencent): mlx-lm computes their layers as Qwen 3's, and they fill a window of masks in each pass.

Of config.json are read: `model_type` "wedlm"; `mask_token_id`; `qk_norm` true and `attention_bias` false, the shape
of Qwen 3; `wedlm_window_size`, `wedlm_entropy_threshold`, `wedlm_pos_penalty_factor` and Kvasir's own
`wedlm_next_token` and `wedlm_left_to_right`, which may be left out. All of these are part of the weights' digest, and
so of the KV identity.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from kvasir.errors import FailedPrecondition

MODEL_TYPE = "wedlm"
SMALLEST_WINDOW, LARGEST_WINDOW = 4, 32  # tokens
_MORE = 4  # tokens: where one is unsure, most of those behind it are
USUAL_SIZE, USUAL_THRESHOLD, USUAL_PENALTY = 16, 0.3, 0.01  # tokens, nats, nats for each place


@dataclass(frozen=True, slots=True)
class MaskWindow:
    """How a model fills masks: `size` of them stand behind the committed tokens. A pass draws a token at each, and
    keeps those whose entropy (nats), and `position_penalty` for each place in front of it, are below the threshold.

    `draws_next`: the model learned the next token too, at the row of the last committed one. So a prompt gives
    the reply's first token, and place 0 has no mask where nothing is kept behind it, which that row cannot see. It is
    always kept.

    `left_to_right`: tokens behind the first unsure one are drawn again, so that none is kept that did not see it. A
    reply's first window has `size` tokens, and each later one four more than the pass before committed.
    """

    mask_token_id: int
    size: int = USUAL_SIZE
    entropy_threshold: float = USUAL_THRESHOLD
    position_penalty: float = USUAL_PENALTY
    draws_next: bool = False
    left_to_right: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> "MaskWindow | None":
        """None for a model of another type. Raises FailedPrecondition, which names the field of config.json."""
        if config.get("model_type") != MODEL_TYPE:
            return None
        if not config.get("qk_norm") or config.get("attention_bias"):
            raise _unfit("qk_norm", "only WeDLM models of Qwen 3's shape are served: true, and attention_bias false")
        mask, vocabulary = config.get("mask_token_id"), int(config.get("vocab_size") or 0)
        if not _is_whole(mask) or not 0 <= mask < vocabulary:
            raise _unfit("mask_token_id", f"expected a token id below {vocabulary}, got {mask}")
        size = config.get("wedlm_window_size", USUAL_SIZE)
        if not _is_whole(size) or not SMALLEST_WINDOW <= size <= LARGEST_WINDOW:
            raise _unfit("wedlm_window_size", f"expected {SMALLEST_WINDOW} to {LARGEST_WINDOW}, got {size}")
        threshold = _not_negative(config, "wedlm_entropy_threshold", USUAL_THRESHOLD)
        penalty = _not_negative(config, "wedlm_pos_penalty_factor", USUAL_PENALTY)
        draws_next, left_to_right = (_switch(config, f"wedlm_{name}") for name in ("next_token", "left_to_right"))
        return cls(mask, size, threshold, penalty, draws_next, left_to_right)

    def size_behind(self, committed: int | None) -> int:
        """Of a window behind a pass that committed so many tokens; None: of a reply's first one."""
        if committed is None or not self.left_to_right:
            return LARGEST_WINDOW
        return committed + _MORE


def layers_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as one of the model whose layers mlx-lm computes: of a WeDLM model Qwen 3's."""
    return {**config, "model_type": "qwen3"} if MaskWindow.of_config(config) is not None else dict(config)


def keep_transformers_quiet() -> None:
    """Its tokenizers warn of a model type that it does not know, though they need nothing of the model. Idempotent."""
    logging.getLogger("transformers.configuration_utils").addFilter(_is_about_another_type)


def _is_about_another_type(record: logging.LogRecord) -> bool:
    return f"model of type `{MODEL_TYPE}`" not in record.getMessage()


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _not_negative(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise _unfit(name, f"expected a number from 0 on, got {value}")
    return float(value)


def _switch(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise _unfit(name, f"expected true or false, got {value}")
    return value


def _unfit(name: str, why: str) -> FailedPrecondition:
    return FailedPrecondition.of("model", f"config.json, {name}: {why}", reason="MODEL_NOT_LOADABLE")
