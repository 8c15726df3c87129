"""Text to tokens and back: the model's tokenizer and chat template behind one thread.

A tokenizer may keep state while it encodes, and a long prompt takes it a second: so it has a thread of its own, and the
event loop goes on. Namespaces come to it in turn: a hundred long prompts of one hold up another's by one of them.
"""

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from kvasir.errors import InvalidArgument, Unavailable
from kvasir.server.shared_room import SharedRoom

from inference_svc.model.reply_machine import TOOL_CALL_END, TOOL_CALL_START, reply_machine
from inference_svc.text.given_json import GivenJson
from inference_svc.text.literal_text import GUARD, Specials, insert_guards, utf8_bytes, with_guards, without_guards
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.reply_parts import Markup, ReplyReader
from inference_svc.text.sequence_state import SequenceState
from inference_svc.text.token_text import TokenText

T = TypeVar("T")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class Tokenized:
    """Tokens of a text and the code points of it that each completes."""

    ids: tuple[int, ...]
    chars: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Said:
    """A prompt and its reply as they are remembered, and the reply as its message holds it."""

    transcript: RememberedText
    reply: str


class Prompting:
    """One model's tokenizer. The methods block: call them inside `run`."""

    def __init__(self, tokenizer: Any, token_text: TokenText) -> None:
        """`tokenizer`: mlx-lm's TokenizerWrapper."""
        self._tokenizer = tokenizer
        self._token_text = token_text
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._thread_room = SharedRoom(1)
        self._json_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="json")
        self._json_room = SharedRoom(1)
        self._is_closed = False
        self._twin: Prompting | None = None
        self._special_ids = _special_ids(tokenizer)
        self.specials = Specials(self._special_ids)
        """How the tokens are spelled that are no text but structure, such as a message's end."""
        unknown = getattr(tokenizer, "unk_token_id", None)  # comes of characters that the tokenizer does not know
        self._structure = frozenset(self._special_ids.values()) - {unknown}
        self._reply_machine = reply_machine(tokenizer)
        self._longest_token = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)

    async def run(self, namespace: str, work: Callable[[], T]) -> T:
        """Do something with the tokenizer on its thread, in the namespace's turn. Raises Unavailable after close."""
        async with self._thread_room.held_for(namespace, 1):
            self._check_open()
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def read(self, namespace: str, objects: GivenJson) -> None:
        """Parse a request's JSON on a thread for it, namespaces in turn. Raises InvalidArgument, the field named, and
        Unavailable after close."""
        if not objects.is_read:
            async with self._json_room.held_for(namespace, 1):
                self._check_open()
                await asyncio.get_running_loop().run_in_executor(self._json_thread, objects.read)

    async def twin(self, namespace: str) -> "Prompting":
        """The same tokenizer again, with threads of its own, made when first asked for: what it does holds up nothing
        that is done here. Raises Unavailable after close."""
        if self._twin is None:
            self._twin = await self.run(namespace, lambda: Prompting(copy.deepcopy(self._tokenizer), self._token_text))
            if self._is_closed:
                self._twin.close()
        return self._twin

    def close(self) -> None:
        self._is_closed = True
        if self._twin is not None:
            self._twin.close()
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._json_thread.shutdown(wait=False, cancel_futures=True)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the model was unloaded", reason="MODEL_CHANGING", retry_after_s=1.0)

    def fewest_tokens(self, text: str) -> int:
        """No text of so many bytes has fewer tokens: lets an absurd prompt be refused without tokenizing it."""
        return -(-utf8_bytes(without_guards(text)) // self._longest_token)

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
        """Tokens of a text that stands for itself: nothing is put before or behind it. Special tokens are those that it
        spells without a guard, and no others.
        """
        return self._in_pieces(text.split(GUARD), between=len(GUARD))

    def _in_pieces(self, pieces: Sequence[str], between: int) -> Tokenized:
        """Pieces of a text, each for itself. So many characters between two count to the token before them."""
        ids: list[int] = []
        chars: list[int] = []
        unclaimed = 0  # characters that no token completes yet
        for number, piece in enumerate(pieces):
            unclaimed += between if number else 0
            if chars:
                chars[-1] += unclaimed
                unclaimed = 0
            tokens = self._piece(piece)
            if tokens.ids:
                ids += tokens.ids
                chars += [unclaimed + tokens.chars[0], *tokens.chars[1:]]
                unclaimed = 0
            else:
                unclaimed += len(piece)
        if chars:
            chars[-1] += unclaimed
        return Tokenized(tuple(ids), tuple(chars))

    def _piece(self, text: str) -> Tokenized:
        """Tokens of a text without guards."""
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        found = [token_id for token_id in ids if token_id in self._structure]
        is_right = not found or found == [self._special_ids[spelling] for spelling in self.specials.spelled(text)]
        # A tokenizer that normalizes may make a special token of what does not spell it ("＜s＞").
        if not is_right and (parts := self._parts(text)) != [text]:
            return self._in_pieces(parts, between=0)
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

    def reader(self, prompt: str, tools: Sequence[dict[str, Any]], id_prefix: str) -> ReplyReader:
        """Reads a reply to a prompt that the chat template made; the prompt may have begun the reasoning already.
        `tools`: as templates know them.
        """
        tokenizer, fields = self._tokenizer, list(tools) or None
        parser = tokenizer.tool_parser
        is_thinking = tokenizer.has_thinking and prompt.rstrip().endswith(tokenizer.think_start)
        markup = Markup(
            self._reply_machine,
            (lambda text: parser(text, fields)) if parser is not None else json.loads,
            tokenizer.tool_call_end if tokenizer.has_tool_calling else TOOL_CALL_END,
            tokenizer.response_initial_state or ("reasoning" if is_thinking else "normal"),
        )
        return ReplyReader(markup, id_prefix)

    def said(self, prompt: str, prompt_tokens: int, generated: str, reply: str, state: SequenceState) -> Said:
        """What is remembered of a reply: of what the model spelled letter by letter, no special token comes later."""
        spans, at = [], 0
        for token_id, count in zip(state.token_ids[prompt_tokens:], state.token_chars[prompt_tokens:], strict=True):
            if token_id in self._structure:
                spans.append((at, at + count))
            at += count
        # What a token held before a stop string belongs to the reply, and not to what was generated.
        whole = reply if reply.startswith(generated) else generated
        places = self.specials.echoed(whole, spans)
        before = [len(prompt) + place for place in places if place <= len(generated)]
        text, chars = insert_guards(prompt + generated, state.token_chars, before)
        told = with_guards(reply, [place for place in places if place <= len(reply)])
        return Said(RememberedText(text, state.token_ids, chars), told)

    def _parts(self, text: str) -> list[str]:
        """The text, cut inside of each stretch that becomes a special token without spelling it."""
        encoded = self._tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        parts, begin = [], 0
        for token_id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            # Some take the spaces around them in.
            if token_id not in self._structure or self._special_ids.get(text[start:end].strip()) == token_id:
                continue
            if end - start == 1:  # it cannot be cut
                text = text[:start] + _REPLACEMENT + text[end:]
            elif begin <= start < end:
                parts.append(text[begin : start + 1])
                begin = start + 1
        return [*parts, text[begin:]]

    def _by_offsets(self, text: str) -> Tokenized:
        encoded = self._tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
        # A token completes what lies before the next one's first character; the last completes the rest.
        ends = [0, *(max(min(begin, len(text)), 0) for begin in starts[1:])]
        for index in range(1, len(ends)):
            ends[index] = max(ends[index], ends[index - 1])
        chars = [end - before for before, end in pairwise(ends)]
        return Tokenized(tuple(encoded["input_ids"]), tuple(chars))


def _special_ids(tokenizer: Any) -> dict[str, int]:
    """A tokenizer's special tokens, by their spelling."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {str(token): int(token_id) for token_id, token in added.items() if token.special}
    named = getattr(tokenizer, "all_special_tokens", ())
    found |= {
        str(token): int(tokenizer.convert_tokens_to_ids(str(token))) for token in named if str(token) not in found
    }
    return {spelling: token_id for spelling, token_id in found.items() if spelling.strip()}
