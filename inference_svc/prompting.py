"""Text to tokens and back: the model's tokenizer and chat template behind one thread.

A tokenizer may keep state while it encodes, and a long prompt takes it a second: so it has a thread of its own, and the
event loop goes on.
"""

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from kvasir.errors import InvalidArgument, Unavailable

from inference_svc.conversation import Tool, tool_fields
from inference_svc.models.reply_machine import TOOL_CALL_END, TOOL_CALL_START, reply_machine
from inference_svc.reply_parts import Markup, ReplyReader
from inference_svc.token_text import TokenText

T = TypeVar("T")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens of a text and the code points of it that each completes."""

    ids: tuple[int, ...]
    chars: tuple[int, ...]


class Prompting:
    """One model's tokenizer. The methods block: call them inside `run`."""

    def __init__(self, tokenizer: Any, token_text: TokenText) -> None:
        """`tokenizer`: mlx-lm's TokenizerWrapper."""
        self._tokenizer = tokenizer
        self._token_text = token_text
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._is_closed = False
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self.special_texts = tuple(str(token) for token in added if token.special and str(token).strip())
        """How the tokens are spelled that are no text but structure, such as a message's end."""
        self._reply_machine = reply_machine(tokenizer)
        self._longest_token = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    async def run(self, work: Callable[[], T]) -> T:
        """Do something with the tokenizer on its thread. Raises Unavailable after close."""
        if self._is_closed:
            raise Unavailable("the model was unloaded", reason="MODEL_CHANGING", retry_after_s=1.0)
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def fewest_tokens(self, text_bytes: int) -> int:
        """No text of so many bytes has fewer tokens: lets an absurd prompt be refused without tokenizing it."""
        return -(-text_bytes // self._longest_token)

    def template(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, add_generation_prompt: bool
    ) -> str:
        """The chat template's text. Raises InvalidArgument when there is none, and whatever the template raises."""
        if not self._tokenizer.has_chat_template:
            raise InvalidArgument("messages: this model has no chat template; send a prompt", field="messages")
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
        )
        return str(text)

    def tokenize(self, text: str) -> Tokenized:
        """Tokens of a text that stands for itself: nothing is put before or behind it."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        spelled, chars = self._token_text.spell(ids)
        if spelled != text:
            # A tokenizer that normalizes: its own offsets say which characters a token stands for.
            return self._by_offsets(text)
        return Tokenized(tuple(ids), tuple(chars))

    def ends_whole(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of a few consecutive tokens ends at a character's border."""
        return not self._tokenizer.decode(list(token_ids), skip_special_tokens=False).endswith(_REPLACEMENT)

    @property
    def tool_start(self) -> str:
        """What stands before a tool call in a reply."""
        return self._tokenizer.tool_call_start or TOOL_CALL_START

    def reader(self, prompt: str, tools: Sequence[Tool], id_prefix: str) -> ReplyReader:
        """Reads a reply to a prompt that the chat template made; the prompt may have begun the reasoning already."""
        tokenizer, fields = self._tokenizer, tool_fields(tools) or None
        parser = tokenizer.tool_parser
        is_thinking = tokenizer.has_thinking and prompt.rstrip().endswith(tokenizer.think_start)
        markup = Markup(
            self._reply_machine,
            (lambda text: parser(text, fields)) if parser is not None else json.loads,
            tokenizer.tool_call_end if tokenizer.has_tool_calling else TOOL_CALL_END,
            tokenizer.response_initial_state or ("reasoning" if is_thinking else "normal"),
        )
        return ReplyReader(markup, id_prefix)

    def _by_offsets(self, text: str) -> Tokenized:
        encoded = self._tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
        # A token completes what lies before the next one's first character; the last completes the rest.
        ends = [0, *(max(min(begin, len(text)), 0) for begin in starts[1:])]
        for index in range(1, len(ends)):
            ends[index] = max(ends[index], ends[index - 1])
        chars = [end - before for before, end in pairwise(ends)]
        return Tokenized(tuple(encoded["input_ids"]), tuple(chars))
