"""Text to tokens and back, on one thread, namespaces in turn: a long prompt takes a tokenizer a second."""

import asyncio
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from kvasir.cachestore.v1 import manifest_pb2
from kvasir.errors import InvalidArgument, Unavailable
from kvasir.server.shared_room import SharedRoom

from inference_svc.model.reply_machine import reply_marks
from inference_svc.model.tokenizing import longest_bytes
from inference_svc.text import literal_text
from inference_svc.text.conversation import ChatTemplate
from inference_svc.text.given_json import GivenJson
from inference_svc.text.prefix_matching import RememberedText
from inference_svc.text.replies.reasoning_limit import ReasoningLimit
from inference_svc.text.replies.reply_parts import Markup, ReplyReader
from inference_svc.text.replies.reply_spacing import NO_SPACING, Spacing, spacing_of
from inference_svc.text.templates.template_clock import ASKS_TIME, TemplateClock, tell_time, telling, wall_clock_ms
from inference_svc.text.templates.template_names import REASONING, TemplateNames, names_read
from inference_svc.text.templates.template_settings import AppliedThinking, AskedThinking, Scalar, applied
from inference_svc.text.token_ids import SequenceState, TokenChars, TokenIds
from inference_svc.text.token_text import TokenText

T = TypeVar("T")
_REPLACEMENT = "\ufffd"
_BORDER = "\n"  # a text that no token joins with its successor
_NO_TOKEN = -1  # in place of a token that is not special


@dataclass(frozen=True, slots=True)
class Tokenized:
    ids: TokenIds
    chars: TokenChars

    def __add__(self, behind: "Tokenized") -> "Tokenized":
        return Tokenized(self.ids + behind.ids, self.chars + behind.chars)


@dataclass(frozen=True, slots=True)
class RememberedReply:
    """A prompt and its reply as the agent remembers them, and the reply as its message holds it."""

    transcript: RememberedText
    reply: str


class Prompting:
    """One model's tokenizer. The methods block: call them inside `run`."""

    def __init__(self, tokenizer: Any, token_text: TokenText, now_ms: Callable[[], int] = lambda: 0) -> None:
        """`tokenizer`: mlx-lm's TokenizerWrapper. `now_ms`: Unix time, for templates that read it."""
        self._now_ms = now_ms
        self._tokenizer = tokenizer
        self._token_text = token_text
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self._thread_room = SharedRoom(1)
        self._json_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="json")
        self._json_room = SharedRoom(1)
        self._render_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="render")
        self._render_room = SharedRoom(1)
        self._is_closed = False
        self._twin: Prompting | None = None
        self._marks = reply_marks(tokenizer)
        marks = {*(self._marks.thinking or ()), self._marks.call_start, self._marks.call_end}
        self._special_ids = _special_ids(tokenizer, marks)
        self.specials = literal_text.Specials(self._special_ids)
        """The spellings of tokens that are structure and not text, such as the end of a message."""
        unknown = getattr(tokenizer, "unk_token_id", None)  # stands for characters that the tokenizer does not know
        self._structure = frozenset(self._special_ids.values()) - {unknown}
        self._spellings = {each: spelling for spelling, each in self._special_ids.items() if each in self._structure}
        self._names: dict[str, TemplateNames] = {}  # by the template's source
        self._spacing = self._reply_spacing()
        self._limit = self._reasoning_limit()
        self._longest_token = token_text.longest_bytes or longest_bytes(tokenizer)

    async def run(self, namespace: str, work: Callable[[], T], *, is_large_render: bool = False) -> T:
        """Run `work` on the tokenizer's thread at the namespace's turn; long renders wait apart. Raises Unavailable."""
        thread, room = self._thread, self._thread_room
        if is_large_render:
            thread, room = self._render_thread, self._render_room
        async with room.held_for(namespace, 1):
            self._check_open()
            return await asyncio.get_running_loop().run_in_executor(thread, work)

    async def read(self, namespace: str, objects: GivenJson) -> None:
        """Parse a request's JSON on a thread of its own, namespaces in turn. Raises InvalidArgument, Unavailable."""
        if not objects.is_read:
            async with self._json_room.held_for(namespace, 1):
                self._check_open()
                await asyncio.get_running_loop().run_in_executor(self._json_thread, objects.read)

    async def twin(self, namespace: str) -> "Prompting":
        """A copy with threads of its own, made at the first call: it delays no work here. Raises Unavailable."""
        if self._twin is None:
            return await self.run(namespace, self._copied)
        return self._twin

    def _copied(self) -> "Prompting":
        """Of first calls at once, each comes here, and none may go away with the copy: one is made, and closed."""
        if self._twin is None:
            self._twin = Prompting(copy.deepcopy(self._tokenizer), self._token_text, self._now_ms)
            if self._is_closed:
                self._twin.close()
        return self._twin

    def close(self) -> None:
        self._is_closed = True
        if self._twin is not None:
            self._twin.close()
        # What is already given to a thread runs: a call whose work is cancelled would get no answer at all.
        self._thread.shutdown(wait=False)
        self._json_thread.shutdown(wait=False)
        self._render_thread.shutdown(wait=False)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unavailable("the model was unloaded", reason="MODEL_CHANGING", retry_after_s=1.0)

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the text's tokens, from its bytes: an absurd prompt is refused without tokenizing it."""
        return -(-literal_text.utf8_bytes(literal_text.without_guards(text)) // self._longest_token)

    def beginning(self, text: str, tokens: int) -> str:
        """A part with at least so many tokens: twice as long as they can spell, as a word may depend on its end."""
        return text[: 2 * tokens * self._longest_token]

    def clock(self, remembered_ms: int = 0) -> TemplateClock:
        """Gives a turn's template the time. `remembered_ms`: the time in the memory that goes on; 0: none."""
        return TemplateClock(remembered_ms, wall_clock_ms(self._now_ms()))

    def template_at(self, clock: TemplateClock, settings: Mapping[str, Scalar] | None = None) -> ChatTemplate:
        """The chat template, with the time from `clock` and the settings that it reads."""
        return partial(self.template, clock=clock, settings=settings)

    def applied(self, asked: AskedThinking, *, has_tools: bool, begins_with_answer: bool) -> AppliedThinking:
        """The settings that this model applies. Raises InvalidArgument that names what it cannot apply."""
        names = self._template_names([{}] if has_tools else None)
        thinks = self._marks.thinking is not None
        found = applied(asked, names.settings, thinks=thinks, begins_with_answer=begins_with_answer)
        return replace(found, settings=self.specials.guarded_value(dict(found.settings)))

    def reasoning_limit(self, most_tokens: int, prompt: str) -> ReasoningLimit | None:
        """The limit of the reply to a prompt that the chat template made."""
        if self._limit is None:
            return None
        return replace(self._limit, most_tokens=most_tokens, is_open=prompt.rstrip().endswith(self._limit.start))

    def template(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        clock: TemplateClock | None = None,
        settings: Mapping[str, Scalar] | None = None,
    ) -> str:
        """The chat template's text. Raises InvalidArgument if the model has none, and any error of the template."""
        if not self._tokenizer.has_chat_template:
            raise InvalidArgument.of("messages", "this model has no chat template; send a prompt")
        if ASKS_TIME in str(getattr(self._tokenizer, "chat_template", "")):
            tell_time(self._tokenizer.get_chat_template(tools=tools))
        if any(REASONING in message for message in messages):
            messages = self._template_names(tools).keyed(messages)
        with telling(clock or self.clock()):
            text = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False, **(settings or {})
            )
        return str(text)

    def _template_names(self, tools: list[dict[str, Any]] | None) -> TemplateNames:
        if not self._tokenizer.has_chat_template:
            return TemplateNames()
        if self._tokenizer._chat_template is not None:  # mlx-lm's own, a program
            return TemplateNames((REASONING,), frozenset(("enable_thinking",)))
        source = self._tokenizer.get_chat_template(tools=tools)
        if source not in self._names:
            self._names[source] = names_read(source, self._tokenizer.special_tokens_map)
        return self._names[source]

    def _reasoning_limit(self) -> ReasoningLimit | None:
        """How this model's reasoning is ended; None for a model that has none."""
        if self._marks.thinking is None:
            return None
        start, end = self._marks.thinking
        spacing, behind = self._spacing.closing, end + self._spacing.answer
        closing, spaced = (tuple(self.tokenize(text, _NO_TOKEN).ids) for text in (behind, spacing + behind))
        starts = self._encoded(start)
        ends = (end, self._marks.call_start) if self._marks.initial == "normal" else (end,)
        return ReasoningLimit(0, start, ends, spacing, closing, spaced, starts[0] if len(starts) == 1 else None)

    def _reply_spacing(self) -> Spacing:
        if not self._tokenizer.has_chat_template:
            return NO_SPACING
        return spacing_of(
            lambda messages, is_prompt: self.template(messages, None, is_prompt), self.tool_start, self._marks.call_end
        )

    def tokenize(self, text: str, last: int | None = None) -> Tokenized:
        """Tokens of exactly this text; only spellings without a guard become special. `last`: the token before it."""
        return self._in_pieces(text.split(literal_text.GUARD), len(literal_text.GUARD), last)

    def _in_pieces(self, pieces: Sequence[str], between: int, last: int | None) -> Tokenized:
        """Tokenize pieces of a text, each by itself. The `between` characters after a piece count to its last token."""
        ids: list[int] = []
        chars: list[int] = []
        unclaimed = 0  # characters that no token completes yet
        for number, piece in enumerate(pieces):
            unclaimed += between if number else 0
            if chars:
                chars[-1] += unclaimed
                unclaimed = 0
            tokens = self._piece(piece, ids[-1] if ids else last)
            if tokens.ids:
                ids += tokens.ids
                chars += [unclaimed + tokens.chars[0], *tokens.chars[1:]]
                unclaimed = 0
            else:
                unclaimed += len(piece)
        if chars:
            chars[-1] += unclaimed
        return Tokenized(TokenIds(ids), TokenChars(chars))

    def _piece(self, text: str, last: int | None) -> Tokenized:
        before, head = self._before(last)
        ids = self._encoded(before + text) if text else head
        if ids[: len(head)] != head:
            before, head, ids = "", [], self._encoded(text)
        own = ids[len(head) :]
        found = [token_id for token_id in own if token_id in self._structure]
        is_right = not found or found == [self._special_ids[spelling] for spelling in self.specials.spelled(text)]
        # A tokenizer that normalizes may make a special token of a text that does not spell it ("＜s＞").
        if not is_right and (parts := self._parts(text)) != [text]:
            return self._in_pieces(parts, 0, last)
        spelled, chars = self._token_text.spell(own, is_behind=bool(before))
        if spelled != text:
            # This tokenizer normalizes: its own offsets show which characters a token stands for.
            return self._by_offsets(before, text, len(head))
        return Tokenized(TokenIds(own), TokenChars(chars))

    def _before(self, last: int | None) -> tuple[str, list[int]]:
        """What a text is tokenized behind, so that no space comes before it: a special token or a line's end."""
        if last is None or not self._token_text.strips_leading_space:
            return "", []
        before = self._spellings.get(last, _BORDER)
        return before, self._encoded(before)

    def framed(self, text: str) -> tuple[list[int], list[int], list[int]]:
        """Tokens of a text that is no prompt, and those that the tokenizer puts before and behind it."""
        ids = list(self.tokenize(self.specials.guarded(text)).ids)
        probe = self._encoded("a")
        around = list(self._tokenizer.encode("a", add_special_tokens=True))
        places = [at for at in range(len(around)) if around[at : at + len(probe)] == probe]
        at = places[0] if places else 0
        return around[:at], ids, around[at + len(probe) :] if places else []

    def _encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def spelled(self, token_ids: Sequence[int]) -> tuple[str, Tokenized]:
        """The text of tokens that a caller sent, with guards in the letters that spell a special token and are none."""
        spelled, chars = self._token_text.spell(token_ids)
        text = literal_text.from_outside(spelled)
        text, counts = literal_text.insert_guards(
            text, TokenChars(chars), self.specials.echoed(text, self._structure_spans(token_ids, chars))
        )
        return text, Tokenized(TokenIds(token_ids), counts)

    def ends_whole(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of a few consecutive tokens ends at the border of a character."""
        return not self._tokenizer.decode(list(token_ids), skip_special_tokens=False).endswith(_REPLACEMENT)

    @property
    def tool_start(self) -> str:
        return self._marks.call_start

    def reader(self, prompt: str, tools: Sequence[dict[str, Any]], reply_id: str, begins_with: str = "") -> ReplyReader:
        """A reader of the reply to a template's prompt, which may begin the reasoning. See ReplyReader."""
        marks, fields = self._marks, list(tools) or None
        ends = marks.thinking is not None and prompt.rstrip().endswith(marks.thinking[0])
        is_thinking = ends and marks.initial == "normal" and not begins_with
        markup = Markup(
            marks.machine,
            lambda text: marks.parse(text, fields),
            marks.call_end,
            marks.call_state if begins_with else "reasoning" if is_thinking else marks.initial,
            self._spacing,
            prompt[len(prompt.rstrip()) :] if is_thinking else "",
            self._spacing.before if prompt.endswith(self._spacing.prompt_end) else "",
        )
        return ReplyReader(markup, reply_id, begins_with)

    def message_of(self, reply: str, tools: Sequence[dict[str, Any]]) -> manifest_pb2.Message:
        """A reply that is remembered as one text, with its thoughts and calls apart. Its prompt may have begun them."""
        said, thinking = literal_text.without_guards(reply), self._marks.thinking
        has_begun = thinking is not None and thinking[1] in said and thinking[0] not in said
        reader = self.reader(thinking[0] if thinking is not None and has_begun else "", tools, "")
        part = reader.whole(said, self._marks.call_end)
        return manifest_pb2.Message(content=part.answer, reasoning=part.reasoning, tool_calls=reader.calls)

    def remembered_reply(
        self, prompt: str, prompt_tokens: int, generated: str, reply: str, state: SequenceState
    ) -> RememberedReply:
        """The transcript after a reply. Guards keep letters that the model spelled from becoming special tokens."""
        spans = self._structure_spans(state.token_ids[prompt_tokens:], state.token_chars[prompt_tokens:])
        # Characters of a token before a stop string belong to the reply, but not to the generated text.
        whole = reply if reply.startswith(generated) else generated
        places = self.specials.echoed(whole, spans)
        before = [len(prompt) + place for place in places if place <= len(generated)]
        text, chars = literal_text.insert_guards(prompt + generated, state.token_chars, before)
        guarded = literal_text.with_guards(reply, [place for place in places if place <= len(reply)])
        return RememberedReply(RememberedText(text, state.token_ids, chars), guarded)

    def _structure_spans(self, token_ids: Sequence[int], token_chars: Sequence[int]) -> list[tuple[int, int]]:
        """From where to where special tokens stand in the text of these tokens."""
        ends = list(accumulate(token_chars))
        spans = zip(token_ids, token_chars, ends, strict=True)
        return [(end - chars, end) for token_id, chars, end in spans if token_id in self._structure]

    def _parts(self, text: str) -> list[str]:
        """The text, cut inside each stretch that would become a special token without spelling it."""
        encoded = self._tokenizer._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        parts, begin = [], 0
        for token_id, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
            # Some special tokens include the spaces around them.
            if token_id not in self._structure or self._special_ids.get(text[start:end].strip()) == token_id:
                continue
            if end - start == 1:  # it cannot be cut
                text = text[:start] + _REPLACEMENT + text[end:]
            elif begin <= start < end:
                parts.append(text[begin : start + 1])
                begin = start + 1
        return [*parts, text[begin:]]

    def _by_offsets(self, before: str, text: str, head: int) -> Tokenized:
        encoded = self._tokenizer._tokenizer(before + text, add_special_tokens=False, return_offsets_mapping=True)
        starts = [start - len(before) for start, _ in encoded["offset_mapping"][head:]] + [len(text)]
        # A token completes the characters before the next token's first one; the last token completes the rest.
        ends = [0, *(max(min(begin, len(text)), 0) for begin in starts[1:])]
        for index in range(1, len(ends)):
            ends[index] = max(ends[index], ends[index - 1])
        chars = [end - begin for begin, end in pairwise(ends)]
        return Tokenized(TokenIds(encoded["input_ids"][head:]), TokenChars(chars))


def _special_ids(tokenizer: Any, marks: Collection[str]) -> dict[str, int]:
    """Special tokens by their spelling, and those that the template writes, or `marks` around parts of replies."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    template = str(getattr(tokenizer, "chat_template", None) or "")

    def is_structure(token: Any) -> bool:
        spelling = str(token).strip()
        looks_so = len(spelling) > 2 and spelling[0] in "<[" and spelling[-1] in ">]"
        return bool(token.special) or (looks_so and (spelling in marks or spelling in template))

    found = {str(token): int(token_id) for token_id, token in added.items() if is_structure(token)}
    named = getattr(tokenizer, "all_special_tokens", ())
    found |= {
        str(token): int(tokenizer.convert_tokens_to_ids(str(token))) for token in named if str(token) not in found
    }
    return {spelling: token_id for spelling, token_id in found.items() if spelling.strip()}
