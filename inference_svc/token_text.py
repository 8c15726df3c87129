"""What tokens spell: bytes per token, code points per token, and text that grows a token at a time.

Built once per model (a detokenizer built per request costs tens of milliseconds), pure, and the same for prompts and
replies, so that `token_chars` in a manifest adds up to the length of its text.
"""

from collections.abc import Sequence


class TokenText:
    """The spelling of every token of one tokenizer."""

    def spell(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Text of the tokens, special tokens spelled, and the code points that each token completes (manifest.proto
        `token_chars`).

        The counts add up to the text's length. Bytes of a character that never completes are left out of the text.
        """
        raise NotImplementedError

    def stream(self) -> "TextStream":
        """A growing text that begins empty."""
        raise NotImplementedError


class TextStream:
    """Text of tokens that arrive one by one."""

    def push(self, token_id: int) -> str:
        """The code points that this token completes."""
        raise NotImplementedError
