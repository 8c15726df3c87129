"""Messages by their descriptors: filled so that they mean something, and then made wrong in one place or several.

Nothing here knows a message by name: a new field is filled by its name or type, and mutated by its type.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.campaigns.fuzz import hostile
from tools.kvasir_tiny.words import Dice

_F = FieldDescriptor
_MOST_DEPTH = 6
_MANY = (2, 17, 129, 301, 1001, 10_001)
_MANY_MESSAGE_BYTES = 300_000

# What a request may name so that it is understood: by field name, or by the full name of a message type.
Known = Mapping[str, Sequence[Any]]


def fill(message: Message, dice: Dice, known: Known, depth: int = 0) -> Message:
    """Set most fields to something that is likely to be valid."""
    chosen = {oneof.name: dice.pick(oneof.fields) for oneof in message.DESCRIPTOR.oneofs}
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if depth > _MOST_DEPTH or (oneof is not None and chosen[oneof.name] is not field):
            continue
        if dice.chance(0.9 if field.name in known or field.cpp_type == _F.CPPTYPE_MESSAGE else 0.5):
            _set(message, field, dice, known, depth)
    return message


def mutate(message: Message, dice: Dice, known: Known) -> None:
    """Make one place wrong: some field of this message or of one inside."""
    places = list(_places(message))
    if not places:
        return
    owner, field = dice.pick(places)
    if _is_map(field):
        _mutate_map(owner, field, dice, known)
    elif _is_repeated(field):
        _mutate_repeated(owner, field, dice, known)
    elif field.cpp_type == _F.CPPTYPE_MESSAGE:
        owner.ClearField(field.name)
        if dice.chance(0.5):
            getattr(owner, field.name).SetInParent()
    else:
        setattr(owner, field.name, dice.pick(hostile.values_for(field)))


def _set(message: Message, field: FieldDescriptor, dice: Dice, known: Known, depth: int) -> None:
    if _is_map(field):
        key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        target = getattr(message, field.name)
        for _ in range(dice.below(3)):
            name = _value(key, dice, known)
            name = str(name) if key.cpp_type == _F.CPPTYPE_STRING else name
            if value.cpp_type == _F.CPPTYPE_MESSAGE:
                fill(target[name], dice, known, depth + 1)
            else:
                target[name] = _value(value, dice, known)
        return
    items = dice.between(0, 3) if _is_repeated(field) else 1
    for _ in range(items):
        if field.cpp_type == _F.CPPTYPE_MESSAGE:
            target = getattr(message, field.name)
            inner = target.add() if _is_repeated(field) else target
            if (choices := known.get(field.message_type.full_name)) and dice.chance(0.9):
                inner.CopyFrom(dice.pick(choices))
            else:
                inner.SetInParent()
                fill(inner, dice, known, depth + 1)
        elif _is_repeated(field):
            getattr(message, field.name).append(_value(field, dice, known))
        else:
            setattr(message, field.name, _value(field, dice, known))


def _value(field: FieldDescriptor, dice: Dice, known: Known) -> Any:
    if field.cpp_type == _F.CPPTYPE_ENUM:
        return dice.pick([value.number for value in field.enum_type.values])
    if field.name in known:
        return dice.pick(known[field.name])
    if field.cpp_type == _F.CPPTYPE_BOOL:
        return dice.chance(0.5)
    if field.cpp_type == _F.CPPTYPE_STRING:
        return b"data" if field.type == _F.TYPE_BYTES else dice.pick(["a", "word", "two words"])
    if field.cpp_type in (_F.CPPTYPE_FLOAT, _F.CPPTYPE_DOUBLE):
        return dice.pick([0.0, 0.5, 1.0])
    return dice.below(4)


def _places(message: Message, depth: int = 0) -> list[tuple[Message, FieldDescriptor]]:
    """Every field, set or not, of this message and of those that are set inside it."""
    places = []
    for field in message.DESCRIPTOR.fields:
        places.append((message, field))
        if field.cpp_type != _F.CPPTYPE_MESSAGE or _is_map(field) or depth > _MOST_DEPTH:
            continue
        if _is_repeated(field):
            inside = list(getattr(message, field.name))[:8]
        else:
            inside = [getattr(message, field.name)] if message.HasField(field.name) else []
        for inner in inside:
            places += _places(inner, depth + 1)
    return places


def _mutate_map(owner: Message, field: FieldDescriptor, dice: Dice, known: Known) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    target = getattr(owner, field.name)
    if dice.chance(0.2):
        target.clear()
    count = dice.pick([1, 1, 1, 65, 400])
    for index in range(count):
        name = dice.pick(hostile.values_for(key)) if count == 1 else index
        name = str(name) if key.cpp_type == _F.CPPTYPE_STRING else name
        if value.cpp_type == _F.CPPTYPE_MESSAGE:
            fill(target[name], dice, known, 3)
        else:
            target[name] = dice.pick(hostile.values_for(value))


def _mutate_repeated(owner: Message, field: FieldDescriptor, dice: Dice, known: Known) -> None:
    target = getattr(owner, field.name)
    how = dice.below(4)
    if how == 0 or (how == 1 and not target):
        owner.ClearField(field.name)
    elif how == 1:  # the first of them, over and over
        first = target[0]
        size = first.ByteSize() if isinstance(first, Message) else len(str(first))
        count = min(dice.pick(_MANY), _MANY_MESSAGE_BYTES // (size + 1) + 1)
        target.extend([first] * count)
    elif field.cpp_type == _F.CPPTYPE_MESSAGE:
        fill(target.add(), dice, known, 3)
    else:
        target.append(dice.pick(hostile.values_for(field)))


def _is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.label == _F.LABEL_REPEATED)
