"""Templates of prompts: `${phase.messages[agent]}`, `${key}`, and `$${` for `${`. All is known before any is sent."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from kvasir_orchestrator.model import MAX_TEXT

_EXPRESSION = re.compile(r"\$(?P<escape>\$)\{|\$\{(?P<inside>[^}\n]{0,200})(?P<end>\}?)")
_MESSAGES = re.compile(r"(?P<phase>[a-z][a-z0-9_]*)\.messages\[(?P<agent>[a-z][a-z0-9_]*)\]")
_VALUE = re.compile(r"[a-z][a-z0-9_]*")
EXPECTED = "expected ${phase.messages[agent]} or ${value}; $${ stands for ${ itself"


class TemplateError(ValueError):
    """A template that is not understood; the text names the expected form."""


@dataclass(frozen=True, slots=True)
class Quote:
    """The messages of `phase` that `agent` saw."""

    phase: str
    agent: str

    def __str__(self) -> str:
        return f"${{{self.phase}.messages[{self.agent}]}}"


Pieces = tuple[str | Quote, ...]


def parse(template: str, values: Mapping[str, str]) -> Pieces:
    """The template's pieces, values filled in. A value is text, never a template. Raises TemplateError."""
    pieces: list[str | Quote] = []
    done = size = 0
    for found in _EXPRESSION.finditer(template):
        piece = _piece(found, values)
        pieces += [template[done : found.start()], piece]
        done = found.end()
        size += len(piece) if isinstance(piece, str) else 0
        if size > MAX_TEXT:  # a megabyte of ${value} would spell gigabytes
            raise TemplateError(f"expected at most {MAX_TEXT} characters of values")
    pieces.append(template[done:])
    return _joined(pieces)


def _piece(found: re.Match[str], values: Mapping[str, str]) -> str | Quote:
    if found["escape"]:
        return "${"
    inside = found["inside"].strip()
    if not found["end"]:
        raise TemplateError(f"${{{inside[:40]} has no end: {EXPECTED}")
    if match := _MESSAGES.fullmatch(inside):
        return Quote(match["phase"], match["agent"])
    if inside in values:
        return values[inside]
    if _VALUE.fullmatch(inside):
        raise TemplateError(f"no value {inside!r}: expected one of {', '.join(sorted(values)) or 'none'}")
    raise TemplateError(f"${{{inside[:80]}}}: {EXPECTED}")


def _joined(pieces: list[str | Quote]) -> Pieces:
    """Texts that follow each other as one, and no empty ones."""
    joined: list[str | Quote] = []
    for piece in pieces:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        elif piece != "":
            joined.append(piece)
    return tuple(joined)
