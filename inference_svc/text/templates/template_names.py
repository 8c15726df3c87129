"""What a chat template's source reads: of a message the keys that hold its reasoning, and settings of its own."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

REASONING = "reasoning_content"
"""Where a message in the form of templates has its reasoning here. Families have their own names for it."""
_KEYS = (REASONING, "reasoning", "thinking")
# What templates are given anyway: a setting of such a name would take its place.
_GIVEN = frozenset(
    {
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "template_kwargs"),
        *("strftime_now", "raise_exception", "date_string"),
    }
)


@dataclass(frozen=True, slots=True)
class TemplateNames:
    """`reasoning`: keys of messages. `settings`: names of variables that a caller may set."""

    reasoning: tuple[str, ...] = ()
    settings: frozenset[str] = frozenset()

    def keyed(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages with their reasoning where the template reads it; without it where it reads none."""
        return [self._keyed(message) if REASONING in message else dict(message) for message in messages]

    def _keyed(self, message: Mapping[str, Any]) -> dict[str, Any]:
        others = {key: value for key, value in message.items() if key != REASONING}
        return others | dict.fromkeys(self.reasoning, message[REASONING])


def names_read(source: str, specials: Iterable[str] = ()) -> TemplateNames:
    """`specials`: special tokens' names, which templates get. Raises jinja2's TemplateError for a wrong template."""
    # Late: it takes a second.
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    tree = _compile_jinja_template(source).environment.parse(source)
    said = {each.value for each in tree.find_all(nodes.Const)} | {each.attr for each in tree.find_all(nodes.Getattr)}
    # What a template sets itself is a caller's only where it is looked for first.
    own = {each.name for each in tree.find_all(nodes.Name) if each.ctx == "store"}
    tested = [each.node for each in tree.find_all(nodes.Test) if each.name in ("defined", "undefined")]
    tested += [each.node for each in tree.find_all(nodes.Filter) if each.name in ("default", "d")]
    own -= {each.name for each in tested if isinstance(each, nodes.Name)}
    settings = meta.find_undeclared_variables(tree) - own - _GIVEN - set(specials)
    return TemplateNames(tuple(key for key in _KEYS if key in said), frozenset(settings))
