"""The content of a sequence: its tokens, and how much text each of them completes."""

from dataclasses import dataclass

from inference_svc.text.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The tokens of a sequence; token i completes `token_chars[i]` code points of the whole text."""

    token_ids: TokenIds
    token_chars: tuple[int, ...]
    shareable_tokens: int  # leading tokens computed on the grid from position 0, a multiple of 256
    rewind_points: tuple[int, ...] = ()  # token counts, ascending, that a model with states can go back to
