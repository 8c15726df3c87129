"""Real given names and towns of many languages: those that training may use, and those that only evaluation uses."""

import unicodedata

from tools.kvasir_tiny.material import material

_MATERIAL = material("people")

# 304 names that no training conversation holds, in any letter case. Everything in `GIVEN_NAMES` is another name.
HELD_OUT_NAMES = _MATERIAL["HELD_OUT_NAMES"]

GIVEN_NAMES = _MATERIAL["GIVEN_NAMES"]

FAMILY_NAMES = _MATERIAL["FAMILY_NAMES"]

TOWNS = _MATERIAL["TOWNS"]

LONG_TOWNS = _MATERIAL["LONG_TOWNS"]


def folded(text: str) -> str:
    """Lower case, without accents."""
    parts = unicodedata.normalize("NFD", text.lower())
    return "".join(letter for letter in parts if not unicodedata.combining(letter))


HELD_OUT_FOLDED = {folded(name) for name in HELD_OUT_NAMES}
