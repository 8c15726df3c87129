"""Random models that write calls in each format, and tools of many shapes for them to call."""

import json
from pathlib import Path
from typing import Any

from tests.inference.engine.tiny_models import LLAMA, VOCABULARY, write_model

# Markers that are tokens of their own in the format's models, and whether those are special. Others are spelled.
MARKERS: dict[str, tuple[bool, tuple[str, ...]]] = {
    "json_tools": (False, ("<tool_call>", "</tool_call>")),
    "qwen3_coder": (False, ("<tool_call>", "</tool_call>")),
    "mistral": (True, ("[TOOL_CALLS]", "[ARGS]")),
    "kimi_k2": (
        True,
        (
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
    ),
    "kimi_k3": (True, ("<|open|>", "<|sep|>", "<|close|>")),
    "pythonic": (True, ("<|tool_call_start|>", "<|tool_call_end|>")),
    "minimax_m2": (False, ("<minimax:tool_call>", "</minimax:tool_call>")),
    "glm47": (False, ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")),
    "longcat": (False, ("<longcat_tool_call>", "</longcat_tool_call>")),
    "minicpm5": (True, ("<function", "</function>")),
    "muse_spark": (False, ()),
}
MARKERS["laguna"] = MARKERS["glm47"]
MARKERS["gemma4"] = (True, ("<|tool_call>", "<tool_call|>", '<|"|>'))
MARKERS["function_gemma"] = (True, ("<start_function_call>", "<end_function_call>", "<escape>"))


def write_model_that_calls(directory: Path, name: str, seed: int = 0) -> Path:
    """A directory that mlx-lm loads, with the format's parser and its markers in the vocabulary."""
    is_special, markers = MARKERS[name]
    write_model(directory, {**LLAMA, "vocab_size": VOCABULARY + 16}, seed)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    known = {each["content"] for each in tokenizer["added_tokens"]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": VOCABULARY + place, "content": text, "special": is_special, **plain}
        for place, text in enumerate(text for text in markers if text not in known)
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "tool_parser_type": name}))
    return directory


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


_SHORT = {"type": "string", "minLength": 1, "maxLength": 6}
_POINT = _object(("x",), x={"type": "integer", "minimum": -9, "maximum": 9}, y={"type": "number", "enum": [0.5, 1]})
# All formats carry these. Each is bounded: random weights end no object that may have any members.
PLAIN: dict[str, dict[str, Any]] = {
    "nothing": _object(),
    "city": _object(("city",), city=_SHORT),
    "unit": _object(("unit",), unit={"type": "string", "enum": ["°C", "K", "漢", "a b"]}, days={"type": "integer"}),
    "flags": _object(("on",), on={"type": "boolean"}, level={"type": "integer", "minimum": 0, "maximum": 3}),
    "list": _object(("xs",), xs={"type": "array", "items": {"type": "integer", "enum": [1, 20, 300]}, "maxItems": 3}),
    "nested": _object(
        ("at",),
        at=_POINT,
        path={"type": "array", "items": _POINT, "maxItems": 2},
        note={"type": "string", "maxLength": 9},
    ),
    "deep": _object(("a",), a=_object(("b",), b=_object(("c",), c={"type": "array", "items": _SHORT, "maxItems": 2}))),
    "optional": _object((), **{f"p{number}": _SHORT for number in range(5)}),
}
# Those that write arguments as JSON carry these too.
RICH: dict[str, dict[str, Any]] = {
    "choice": _object(("v",), v={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 5}, _SHORT, {"type": "null"}]}),
    "reference": {**_object(("p",), p={"$ref": "#/$defs/point"}), "$defs": {"point": _POINT}},
    "pattern": _object(("id",), id={"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}),
    "words": _object(("é", "a b"), **{"é": {"const": "ü"}, "a b": {"type": "string", "format": "date"}}),
}
WRITTEN_AS_JSON = ("json_tools", "mistral", "kimi_k2", "kimi_k3")
NESTED = ("list", "nested", "deep")


def schemas_of(name: str) -> dict[str, dict[str, Any]]:
    """What tools of a format may take, by the tools' names."""
    if name == "function_gemma":  # it has no nesting
        return {each: schema for each, schema in PLAIN.items() if each not in NESTED}
    if name == "gemma4":
        return {**PLAIN, "choice": RICH["choice"], "reference": RICH["reference"]}
    return {**PLAIN, **(RICH if name in WRITTEN_AS_JSON else {})}
