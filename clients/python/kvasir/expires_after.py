"""How long an agent may stay unused before the store deletes it: a setting of the store, or an agent's label."""

import re

from kvasir.errors import InvalidArgument

LABEL = "kvasir.expires_after"
"""The agent's label: a time as 12h, 30d or 8w, or "never" where the store would delete it."""
NEVER = "never"
_UNIT_S = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
LEAST_S, MOST_S = 60, 3650 * 86_400


def from_label(value: str) -> float | None:
    """Seconds; None for never. Raises InvalidArgument."""
    if value == NEVER:
        return None
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", value)
    if match is None or not LEAST_S <= (seconds := int(match[1]) * _UNIT_S[match[2]]) <= MOST_S:
        raise InvalidArgument(
            f'labels.{LABEL}: expected a time of a minute to ten years, as 12h, 30d or 8w, or "{NEVER}", '
            f"got {value[:40]!r}",
            field=f"labels.{LABEL}",
        )
    return float(seconds)
