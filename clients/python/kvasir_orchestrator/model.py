"""The format of a scenario file as types: what may stand in it, and of what shape. `checks` has the rest."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic.json_schema import WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_TEXT = 32_768
MAX_ROUNDS = 1_000

_KEY, _LABEL, _NAME, _SCENARIO = (
    r"^[a-z][a-z0-9_]{0,63}$",
    r"^[^\x00-\x1f\x7f]+$",
    r"^[^\x00-\x1f\x7f:]*[^\x00-\x20\x7f:]$",
    r"^[a-z][a-z0-9-]{0,63}$",
)
# The same for people.
PATTERNS = {
    _KEY: "a to z, 0 to 9 and _, first a letter, 64 at most",
    _LABEL: "no control characters",
    _NAME: "no colon, no control characters, no space at its end",
    _SCENARIO: "a to z, 0 to 9 and -, first a letter, 64 at most",
}
Key = Annotated[str, StringConstraints(pattern=_KEY)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]
Label = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_LABEL)]
# What others' words begin with in a transcript, so nothing that could pass for the end of a name.
Name = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=_NAME)]


def _one_or_many(value: object) -> object:
    if not isinstance(value, str | list):
        raise PydanticCustomError("prompts", "expected a text, or a list of texts, one a round")
    return [value] if isinstance(value, str) else value


def _is_regex(value: object) -> object:
    if isinstance(value, str):
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise PydanticCustomError("regex", "expected a regular expression: {why}", {"why": str(error)}) from None
    return value


# What `kvasir.on_full` reads, less its shorter spellings of a share.
_ON_FULL = r"^(refuse|drop_oldest|summarize)(:0\.([1-7][0-9]*|80*))?$"


def _is_on_full(value: object) -> object:
    if isinstance(value, str) and not re.fullmatch(_ON_FULL, value):
        raise PydanticCustomError(
            "on_full", 'expected refuse, drop_oldest or summarize, with a share to keep if you like: "summarize:0.4"'
        )
    return value


_TEXT_SCHEMA = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
Prompts = Annotated[
    list[Text],
    Field(min_length=1, max_length=MAX_ROUNDS),
    BeforeValidator(_one_or_many),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}]}),
]
Regex = Annotated[Text, BeforeValidator(_is_regex)]
WhenFull = Annotated[str, BeforeValidator(_is_on_full), WithJsonSchema({"type": "string", "pattern": _ON_FULL})]


class _Part(BaseModel):
    """Part of a scenario file. Unknown fields are refused, and nothing is converted: "3" is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class Sampling(_Part):
    """How replies are sampled."""

    max_tokens: Annotated[int, Field(ge=1, le=65_536)] = 64
    """The longest reply, in tokens."""
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0 is greedy."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Each turn samples with a seed of its own, made from this one: the same file gives the same conversation."""


class Agent(_Part):
    """One who takes part and remembers."""

    name: Name | None = None
    """How others call it in their transcripts. Left out: its key with a capital."""
    persona: Annotated[str, StringConstraints(max_length=MAX_TEXT)] = ""
    """The system message of its memory."""
    lifetime: Literal["permanent", "ephemeral"] = "permanent"
    """A permanent agent keeps its memory after the scenario; an ephemeral one is deleted at its end."""
    namespace: Annotated[str, StringConstraints(max_length=200)] = ""
    """Whose credential its turns use. Left out: the caller's own."""
    id: Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=_LABEL)] | None = None
    """The agent's name at the engine. Left out: SCENARIO/KEY."""

    on_full: WhenFull | None = None
    """What happens to its oldest messages when its memory outgrows the model's context: refuse, drop_oldest or
    summarize, with the share of the context to keep after a colon. Left out: what its label kvasir.on_full says, else
    refuse."""

    @model_validator(mode="after")
    def _keeps_its_name(self) -> Self:
        if self.id and self.lifetime == "ephemeral":
            raise PydanticCustomError("id", "expected no id of an ephemeral agent: it is deleted at the end")
        return self


class Visibility(_Part):
    """Who besides a phase's agents learns of it, and what not all of them hear."""

    listeners: list[Key] = []
    """Others who hear all of this phase, when they next speak."""
    readers: list[Key] = []
    """Others to whom a template may show this phase. They hear nothing by themselves."""
    whispers: dict[Key, list[Key]] = {}
    """Whose words here are heard by these alone. Nobody else hears or reads them."""


class Phase(_Part):
    """A part of the scenario in which the same agents speak with each other."""

    name: Key
    """How templates and outcomes call it."""
    label: Label | None = None
    """Its headline. Left out: its name."""
    agents: Annotated[list[Key], Field(min_length=1)]
    """Who speaks, in this order, once a round."""
    rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] | None = None
    """How often each speaks. Left out: once."""
    auto_rounds: Annotated[int, Field(ge=1, le=MAX_ROUNDS)] | None = None
    """Another name of `rounds`."""
    together: bool = False
    """All of a round speak at once: they hear each other after it."""
    prompt: Prompts | None = None
    """What all agents of the phase are told: a text at its start, or a list with a text for each round."""
    agent_prompts: dict[Key, Prompts] = {}
    """What one agent alone is told, after `prompt`: a text at its start, or a list with a text for each round."""
    reply_regex: Regex | None = None
    """What every reply must match, from end to end."""
    max_tokens: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """The longest reply here. Left out: the scenario's."""
    visibility: Visibility = Visibility()

    @model_validator(mode="after")
    def _counts_once(self) -> Self:
        if self.rounds and self.auto_rounds:
            raise PydanticCustomError("rounds", "expected rounds or auto_rounds, got both")
        return self

    @property
    def round_count(self) -> int:
        return self.rounds or self.auto_rounds or 1

    @property
    def title(self) -> str:
        return self.label or self.name


class Outcome(_Part):
    """What an answer must be for the scenario to have gone well. Exactly one of the four checks."""

    label: Label
    phase: Key
    agent: Key
    round: Annotated[int, Field(ge=1)] | None = None
    """Whose answer: the one of this round, from 1. Left out: the last."""
    equals: Text | None = None
    contains: Text | None = None
    lacks: Text | None = None
    """What the answer must not contain."""
    matches: Regex | None = None
    """A regular expression for the whole answer."""

    @model_validator(mode="after")
    def _checks_once(self) -> Self:
        given = [name for name in ("equals", "contains", "lacks", "matches") if getattr(self, name) is not None]
        if len(given) != 1:
            raise PydanticCustomError(
                "outcome",
                "expected one of equals, contains, lacks, matches, got {given}",
                {"given": " and ".join(given) or "none"},
            )
        return self


class ScenarioFile(_Part):
    """A scenario: agents who remember, and the phases in which they speak."""

    name: Annotated[str, StringConstraints(pattern=_SCENARIO)]
    """Small letters, digits and hyphens. Its agents are called NAME/KEY at the engine."""
    about: Text = "A scenario."
    """What it is, for people."""
    values: dict[Key, Annotated[list[Label], Field(min_length=1)]] = {}
    """Words that texts use as ${KEY}. The first is taken; a variant draws others."""
    sampling: Sampling = Sampling()
    agents: Annotated[dict[Key, Agent], Field(min_length=1, max_length=256)]
    phases: Annotated[list[Phase], Field(min_length=1, max_length=1000)]
    outcomes: list[Outcome] = []


def json_schema() -> dict[str, Any]:
    """The format as a JSON schema, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **ScenarioFile.model_json_schema()}
