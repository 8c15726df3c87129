"""How far a request may differ from what the gateway knows, if its reply means the same; strict ones refuse it."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir.errors import InvalidArgument
from kvasir.volatile import BILLING_LINE, DEFAULT

from kvasir_gateway.reading.seals import ThoughtSeals
from kvasir_gateway.reading.side_calls import SIDE_RULES, SideRule
from kvasir_gateway.reading.volatile import HEADER, NO_RULES, Rules, asked
from kvasir_gateway.turn import AsWritten, Body, refuse_unless

# Fields of peers' servers and of older APIs that define the reply: without them it would be another one.
MEANINGFUL = frozenset(
    {
        *("functions", "function_call", "thread", "system", "instructions", "prompt", "extra_body"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "grammar"),
        *("regex", "ebnf", "structural_tag", "json_schema", "response_format", "response_format.schema"),
        *("stop", "stop_sequences", "max_output_tokens", "num_predict", "enable_thinking", "thinking"),
        *("echo", "suffix", "best_of"),
        *("chat_template", "chat_template_kwargs", "continue_final_message", "documents", "images"),
        *("ignore_eos", "min_tokens", "stop_token_ids", "bad_words", "use_beam_search", "typical_p"),
    }
)
_NEUTRAL: tuple[object, ...] = (None, False, 0, "", "auto", "none", [], {})
_MAX_NAMED = 32  # in one answer's header
_MAX_IGNORED = 1000  # fields of one request
_MAX_LOGGED = 256  # names of one process
_FIELD = re.compile(r"[A-Za-z0-9_]{1,64}")
_NUMBER = re.compile(r"\[\d+\]")
_log = logging.getLogger(__name__)


@dataclass
class Reading:
    """One request, as it is read: what was ignored of it, and which rules applied."""

    is_strict: bool = False
    rules: Rules = NO_RULES
    any_model: bool = False  # the loaded one answers for a name that is no model's
    seals: ThoughtSeals | None = None  # None: no thoughts are known as ours
    side_rules: Sequence[SideRule] = ()
    side_call: str = ""  # the rule that took the turn for one
    is_billed: bool = False  # it has billing lines, which no rule leaves out
    _ignored: set[str] = field(default_factory=set)
    _applied: set[str] = field(default_factory=set)

    def check(self, body: Body) -> None:
        """Note the fields that nobody knows. Raises InvalidArgument for those that are refused."""
        for name, value in unknown_fields(body):
            if name in MEANINGFUL and value not in _NEUTRAL:
                refuse_unless((), {name: value})
            if value is not None or self.is_strict:
                self._ignore(name, "this server does not know it; leave it out", reason="UNKNOWN_PARAMETER")

    def ignore_unless(self, neutral: Iterable[object], **given: object) -> None:
        """Note settings that this engine cannot apply, unless it does that anyway. Raises InvalidArgument."""
        allowed = [None, *neutral]
        for name, value in given.items():
            if value not in allowed:
                self.ignore(name)

    def ignore(self, name: str) -> None:
        self._ignore(name, "this engine cannot apply it; leave it out")

    def skip(self, name: str) -> None:
        """Note what means nothing here and is refused by no gateway: a part of a history that others made."""
        self._note(name)

    def ignore_tool(self, number: int) -> None:
        """A tool that the server would run; the model is not offered it."""
        self.ignore(f"tools[{number}].type" if self.is_strict else f"tools[{number}]")

    def content(self, role: str, texts: Iterable[str]) -> str:
        """A message's texts, as they were sent, in one: a system's without what is volatile."""
        return "".join(map(self._lasting, texts) if role == "system" else texts)

    def _lasting(self, text: str) -> str:
        self.is_billed |= self.rules.would_leave_out(text)
        lasting = self.rules.lasting(text)
        if lasting != text:
            self.applied([BILLING_LINE])
        return lasting

    def applied(self, rules: Iterable[str]) -> None:
        """Rules changed the prompt."""
        self._applied.update(rules)

    def length(self, max_tokens: int | None) -> dict[str, Any]:
        """Of a Sampling: clients send the most that they know of, whatever the context is."""
        if max_tokens is None:
            return {}
        return {"max_tokens": max_tokens, **({} if self.is_strict else {"clamp_max_tokens": True})}

    @property
    def ignored(self) -> list[str]:
        """The fields that were ignored, without those of a field that was ignored whole."""
        return sorted(name for name in self._ignored if self._ignored.isdisjoint(_wholes_of(name)))

    def headers(self) -> dict[str, str]:
        """What was done with the request, for its answer."""
        told = {}
        if names := self.ignored:
            more = [f"+{len(names) - _MAX_NAMED}"] if len(names) > _MAX_NAMED else []
            told["x-kvasir-ignored"] = ", ".join([*names[:_MAX_NAMED], *more])
        if self._applied:
            told[HEADER] = ", ".join(sorted(self._applied))
        if self.side_call:
            told["x-kvasir-side-call"] = self.side_call
        return told

    def _ignore(self, name: str, why: str, reason: str | None = None) -> None:
        if self.is_strict:
            raise AsWritten.of(name, why, reason=reason)
        self._note(name)

    def _note(self, name: str) -> None:
        self._ignored.add(name)
        if len(self._ignored) > _MAX_IGNORED:
            raise InvalidArgument.of("body", f"expected at most {_MAX_IGNORED} fields that this server does not know")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """How requests are read here, and which ignored fields the log has named."""

    is_strict: bool = False
    rules: frozenset[str] = DEFAULT
    any_model: bool = True
    seals: ThoughtSeals | None = None
    side_rules: Sequence[SideRule] = tuple(SIDE_RULES.values())
    _logged: set[str] = field(default_factory=set)

    def reading(self, rules: str | None, namespace: str = "") -> Reading:
        """`rules`: those of a request's header. Raises InvalidArgument."""
        seals = self.seals.of(namespace) if self.seals is not None else None
        return Reading(self.is_strict, asked(rules, self.rules), self.any_model, seals, self.side_rules)

    def log(self, path: str, reading: Reading) -> None:
        """A line for each field when it is ignored for the first time."""
        for name in reading.ignored:
            told = f"{path} {_NUMBER.sub('[]', name)}"
            if told not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(told)
                _log.info("request.ignored path=%s field=%s", *told.split(" "))


def _wholes_of(name: str) -> Iterator[str]:
    """The fields that a field is in: of a.b.c a and a.b."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts)))


def unknown_fields(body: Body, place: str = "") -> Iterator[tuple[str, object]]:
    """Paths and values of fields that no schema names. A name that is none of a field is not repeated."""
    for name, value in (body.model_extra or {}).items():
        yield f"{place}{name if _FIELD.fullmatch(name) else '(unnamed)'}", value
    for name in type(body).model_fields:
        value = getattr(body, name)
        alias = type(body).model_fields[name].alias or name
        for number, each in enumerate(value if isinstance(value, list) else [value]):
            if isinstance(each, Body):
                at = f"[{number}]" if isinstance(value, list) else ""
                yield from unknown_fields(each, f"{place}{alias}{at}.")
