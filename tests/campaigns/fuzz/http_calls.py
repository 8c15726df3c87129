"""What a fuzzed HTTP request is: made from the gateway's OpenAPI document, and a function of seed and number."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from tests.campaigns.fuzz import hostile, wire
from tests.campaigns.fuzz.mutations import Known
from tools.kvasir_tiny.words import Dice

Json = Mapping[str, Any]
_MOST_DEPTH = 5
_MANY = (2, 17, 129, 1001, 10_001)
_MANY_BYTES = 300_000
_TEXTS = [text for text in hostile.TEXTS if hostile.BROKEN not in text]
_NUMBERS = (*hostile.INTEGERS, *hostile.FLOATS, 1e308, 10**400)
_ODD: tuple[Any, ...] = (None, True, False, [], {}, [None], [[]], {"": None}, {"type": "text"}, {"type": "nothing"})
_TYPES = ("application/json", "application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=x", "")
# A turn that nobody bounds may take minutes.
_SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "num_predict": 2, "budget_tokens": 1}


@dataclass(frozen=True)
class Operation:
    """One operation of the document."""

    name: str
    method: str
    path: str
    facts: Json

    @property
    def body(self) -> Json | None:
        asked = self.facts.get("requestBody")
        return asked and asked["content"]["application/json"]["schema"]


@dataclass(frozen=True)
class HttpCall:
    """One request, as bytes. `takes`: its caller leaves after so many bytes of the answer."""

    operation: Operation
    method: str
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    content: bytes
    takes: int | None = None

    def __str__(self) -> str:
        shown = [(name, value) for name, value in self.headers if name not in (b"authorization", b"x-api-key")]
        return f"{self.method} {self.target[:300]} {shown} takes={self.takes} {self.content[:600]!r}"


@dataclass(frozen=True)
class HttpRequests:
    """All requests to one gateway."""

    document: Json
    known: Known
    keys: Mapping[str, str]
    usual_key: str

    @property
    def operations(self) -> Sequence[Operation]:
        return [
            Operation(facts["operationId"], method.upper(), path, facts)
            for path, methods in self.document["paths"].items()
            for method, facts in methods.items()
        ]

    def of(self, seed: int, number: int) -> HttpCall:
        dice = Dice(f"http {seed} {number}")
        operation = self.operations[number % len(self.operations)]
        wrong = 0 if dice.chance(0.25) else dice.pick([1, 1, 1, 2, 3])
        where = [dice.pick(["body", "body", "body", "bytes", "query", "header", "method", "key"]) for _ in range(wrong)]
        path, query, headers = self._place(operation, dice, where)
        method = dice.pick(["GET", "PUT", "PATCH", "DELETE", "OPTIONS"]) if "method" in where else operation.method
        headers.append((b"content-type", dice.pick(_TYPES if "header" in where else _TYPES[:1]).encode()))
        if (key := self._key(dice, is_odd="key" in where)) is not None:
            headers.append((b"authorization", key.encode()))
        target = f"{path}?{urlencode(query, errors='replace')}" if query else path
        content = self._content(operation, dice, where)
        takes = dice.pick([0, 1, 200]) if dice.chance(0.05) else None
        return HttpCall(operation, method, target, tuple(headers), content, takes)

    def fill(self, schema: Json, dice: Dice, name: str = "", depth: int = 0) -> Any:
        """Something that the schema is likely to allow."""
        if name in self.known and dice.chance(0.95):
            return dice.pick(self.known[name])
        if "$ref" in schema:
            schema = self.document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if choices := [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]:
            return self.fill(dice.pick(choices), dice, name, depth)
        if "const" in schema or "enum" in schema:
            return schema.get("const", dice.pick(schema.get("enum", [None])))
        kind = schema.get("type")
        if kind == "null":
            return None
        if kind == "object" or "properties" in schema:
            return self._object(schema, dice, depth)
        if kind == "array":
            least = schema.get("minItems", 0)
            count = max(least, dice.below(4)) if depth < _MOST_DEPTH else least
            return [self.fill(schema.get("items", {}), dice, name, depth + 1) for _ in range(count)]
        if kind in ("integer", "number"):
            least = schema.get("minimum", 0)
            return min(least + dice.below(3), schema.get("maximum", math.inf))
        return dice.chance(0.5) if kind == "boolean" else dice.pick(["a", "word", "two words"])

    def _object(self, schema: Json, dice: Dice, depth: int) -> Any:
        required = schema.get("required", ())
        fields = schema.get("properties", {})
        made = {
            name: self.fill(inner, dice, name, depth + 1)
            for name, inner in fields.items()
            if name in required or (depth < _MOST_DEPTH and dice.chance(0.15)) or name == "sampling"
        }
        return made | {name: value for name, value in _SHORT.items() if name in fields}

    def _content(self, operation: Operation, dice: Dice, where: Sequence[str]) -> bytes:
        if operation.body is None:
            return b"{}" if "bytes" in where else b""
        body = self.fill(operation.body, dice)
        if operation.path.startswith("/api/"):
            body["options"] = {**(body.get("options") or {}), "num_predict": 2}
        for _ in range(where.count("body")):
            body = mutated(body, dice)
        data = json.dumps(body, ensure_ascii=dice.chance(0.5)).encode("utf-8", "surrogatepass")
        return wire.damage(data, dice) if "bytes" in where else data

    def _place(
        self, operation: Operation, dice: Dice, where: Sequence[str]
    ) -> tuple[str, list[tuple[str, str]], list[tuple[bytes, bytes]]]:
        path = operation.path
        query: list[tuple[str, str]] = []
        headers: list[tuple[bytes, bytes]] = []
        for asked in operation.facts.get("parameters", ()):
            name, place = asked["name"], asked["in"]
            is_odd = {"path": "query"}.get(place, place) in where and dice.chance(0.7)
            value = str(dice.pick([*_TEXTS, *_NUMBERS]) if is_odd else self.fill(asked["schema"], dice, name))
            if place == "path":
                path = path.replace(f"{{{name}}}", quote(value, safe="/" if dice.chance(0.5) else "", errors="replace"))
            elif is_odd or dice.chance(0.4):
                if place == "query":
                    query.append((name, value))
                else:
                    headers.append((name.encode(), value.encode("utf-8", "replace")))
        if "query" in where:
            query.append((dice.pick(_TEXTS)[:200], dice.pick(_TEXTS)[:200]))
        return path, query, headers

    def _key(self, dice: Dice, *, is_odd: bool) -> str | None:
        if not is_odd:
            return f"Bearer {self.keys[self.usual_key]}"
        return dice.pick([None, "", "Bearer ", "Basic eDp4", "Bearer a b", "Bearer " + "x" * 600, *self.keys])


def mutated(value: Any, dice: Dice) -> Any:
    """The value, wrong in one place."""
    if isinstance(value, dict) and value and dice.chance(0.85):
        name = dice.pick(sorted(value))
        how = dice.below(8)
        if how == 0:
            return {key: inner for key, inner in value.items() if key != name}
        if how == 1:
            return {**value, dice.pick(_TEXTS)[:300]: dice.pick(_ODD)}
        return {**value, name: mutated(value[name], dice)}
    if isinstance(value, list) and value and dice.chance(0.85):
        place = dice.below(len(value))
        if dice.chance(0.2):
            size = len(json.dumps(value[place]))
            return [value[place]] * min(dice.pick(_MANY), _MANY_BYTES // (size + 1) + 1)
        return [*value[:place], mutated(value[place], dice), *value[place + 1 :]]
    return dice.pick([dice.pick(_ODD), dice.pick(_TEXTS), dice.pick(_NUMBERS)])
