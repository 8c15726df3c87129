"""The order in which a template was given tools and the keys of their JSON, as a memory keeps it: the same tools in
another order are rendered as before. Equal is JSON that prints alike but for that order. Pure.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from blake3 import blake3
from kvasir.cachestore.v1 import manifest_pb2

from inference_svc.text.conversation import Tool
from inference_svc.text.given_json import GivenJson


class _OtherOrderError(ValueError):
    """The order is of other tools, or of none."""


def order_of(tools: Sequence[Tool], objects: GivenJson) -> manifest_pb2.ToolsOrder | None:
    """The order of these tools; None if there are none. `objects` has their JSON, parsed."""
    if not tools:
        return None
    forms = [_canonical(tool, objects) for tool in tools]
    by_form = sorted(range(len(tools)), key=forms.__getitem__)
    places = [0] * len(tools)
    for place, index in enumerate(by_form):
        places[index] = place
    for tool in tools:
        places += _places_of_keys(objects.object(tool.parameters_json))
    return manifest_pb2.ToolsOrder(set_hash=_set_hash(sorted(forms)), places=places)


def in_order(
    tools: Sequence[Tool], objects: GivenJson, order: manifest_pb2.ToolsOrder
) -> tuple[Sequence[Tool], GivenJson] | None:
    forms = [_canonical(tool, objects) for tool in tools]
    if _set_hash(sorted(forms)) != order.set_hash:
        return None
    by_form = sorted(range(len(tools)), key=forms.__getitem__)
    places = iter(order.places)
    try:
        ordered = [tools[by_form[place]] for place in _next_places(places, len(tools))]
        parameters = [_in_order(objects.object(tool.parameters_json), places) for tool in ordered]
    except _OtherOrderError:  # a foreign manifest may have anything
        return None
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in parameters]
    known = objects.knowing(dict(zip(texts, parameters, strict=True)))
    return [replace(tool, parameters_json=text) for tool, text in zip(ordered, texts, strict=True)], known


def _canonical(tool: Tool, objects: GivenJson) -> bytes:
    value = [tool.name, tool.description, objects.object(tool.parameters_json)]
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _set_hash(forms: Sequence[bytes]) -> str:
    hasher = blake3()
    for form in forms:
        hasher.update(len(form).to_bytes(8, "little"))
        hasher.update(form)
    return hasher.hexdigest()


def _places_of_keys(value: Any) -> Iterator[int]:
    """For each object of several keys the place of each key among the sorted ones, from the outside in."""
    if isinstance(value, dict):
        places = {key: place for place, key in enumerate(sorted(value))}
        if len(value) > 1:
            yield from (places[key] for key in value)
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _places_of_keys(each)


def _in_order(value: Any, places: Iterator[int]) -> Any:
    """The value with its keys in the order that `_places_of_keys` has noted."""
    if isinstance(value, list):
        return [_in_order(each, places) for each in value]
    if not isinstance(value, dict):
        return value
    keys = sorted(value)
    order = _next_places(places, len(keys)) if len(keys) > 1 else range(len(keys))
    return {keys[place]: _in_order(value[keys[place]], places) for place in order}


def _next_places(places: Iterator[int], count: int) -> list[int]:
    found = [next(places, -1) for _ in range(count)]
    if sorted(found) != list(range(count)):
        raise _OtherOrderError
    return found
