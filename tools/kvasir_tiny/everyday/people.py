"""Real given names and towns of many languages: those that training may use, and those that only evaluation uses."""

from tools.kvasir_tiny.material import material

_MATERIAL = material("people")

# 304 names that no training conversation holds, in any letter case. Everything in `GIVEN_NAMES` is another name.
HELD_OUT_NAMES = _MATERIAL["HELD_OUT_NAMES"]

GIVEN_NAMES = _MATERIAL["GIVEN_NAMES"]

FAMILY_NAMES = _MATERIAL["FAMILY_NAMES"]

TOWNS = _MATERIAL["TOWNS"]

LONG_TOWNS = _MATERIAL["LONG_TOWNS"]
