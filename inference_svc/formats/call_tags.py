"""Calls whose arguments are tags, one for each property: six formats of models. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from inference_svc.formats.call_schemas import Schema
from inference_svc.formats.call_writing import KEY, Text, Writing, check_object, shared

_JSON_TYPES = ("integer", "number", "boolean", "object", "array")
_NULL = r"[nN][uU][lL][lL]"


@dataclass(frozen=True, slots=True)
class Tags:
    head: str
    open: str  # before a value; {} is the property's name
    close: str
    tail: str
    reads_json: bool  # anything but a plain string is read as JSON, of any type
    is_stripped: bool  # white space around a text is lost
    texts_are_json: bool = False
    needs_arguments: bool = False  # a call without any is read in another form: as JSON
    barred: tuple[str, ...] = ()  # regular expressions of texts that are read as something else

    def __call__(self, name: str, schema: Schema, writing: Writing) -> str:
        check_object(schema, writing)
        required, common = schema.get("required", ()), shared(schema)
        tags: dict[str, str] = {}
        for key, value in schema.get("properties", {}).items():
            if not KEY.fullmatch(key):
                raise writing.refused(f"property {key[:80]!r} has such a name")
            tags[key] = f"{writing.text(self.open.format(key))} {self._value(key, value, common, writing)}"
        maybe = {key: tag if key in required else f"({tag})?" for key, tag in tags.items()}
        head, tail = writing.text(self.head.format(name)), writing.text(self.tail)
        if not self.needs_arguments or required:
            return " ".join([head, *maybe.values(), tail])
        keys = list(tags)
        some = [" ".join([head, tags[key], *(maybe[k] for k in keys[at + 1 :]), tail]) for at, key in enumerate(keys)]
        return "(" + " | ".join([writing.text(json.dumps({"name": name, "arguments": {}})), *some]) + ")"

    def _value(self, key: str, schema: Any, common: Schema, writing: Writing) -> str:
        schema = schema if isinstance(schema, dict) else {}
        kind = schema.get("type")
        if kind == "string" and not self.texts_are_json:
            return Text(self.close, self.is_stripped, self.barred).rule(key, schema, writing)
        if kind not in _JSON_TYPES and not self.reads_json:
            raise writing.refused(f"property {key!r} has no single type")
        return f"{writing.json({**common, **schema})} {writing.text(self.close)}"


QWEN = Tags("<function={}>\n", "<parameter={}>\n", "\n</parameter>\n", "</function>", False, False, barred=(_NULL,))
MINIMAX = Tags(
    '<invoke name="{}">\n', '<parameter name="{}">', "</parameter>\n", "</invoke>\n", False, True, barred=(_NULL,)
)
GLM = Tags("{}\n", "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n", "", True, True)
LONGCAT = Tags(
    "{}\n",
    "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
    "</longcat_arg_value>\n",
    "",
    True,
    True,
    needs_arguments=True,
)
MINICPM = Tags('"{}">', '<param name="{}">', "</param>", "", False, True, barred=(_NULL, r"<!\[CDATA(?s:.*)"))
MUSE = Tags(
    '<atem:invoke name="{}">\n',
    '<atem:parameter name="{}">',
    "</atem:parameter>\n",
    "</atem:invoke>\n",
    True,
    False,
    texts_are_json=True,
)
