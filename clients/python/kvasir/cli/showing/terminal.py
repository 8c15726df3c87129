"""Text of others for a terminal: what would move its cursor, colour it or turn its lines is shown as an escape."""

import re
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0 and C1 but for newline and tab; and Unicode's marks that turn the direction of writing.
_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with `\\x1b` where it has the control character ESC, and so on. Newlines and tabs stay."""
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def write(text: str, *, is_dim: bool = False) -> None:
    """Write a part of a reply to standard output."""
    sys.stdout.write(f"\x1b[2m{visible(text)}\x1b[22m" if is_dim else visible(text))
    sys.stdout.flush()


class PlainConsole(Console):
    """Shows text as it is: names, labels and memories may look like rich's markup, or hold control characters."""

    def __init__(self, **where: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **where)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """A cell that is wider than its column goes on in the next line. Tables cut it, and names are copied."""
        if options is not None and options.overflow == "ellipsis":
            options = options.update(overflow="fold")
        return super().render(renderable, options)

    def render_str(self, text: str, **how: Any) -> Text:
        """Every text passes here: lines, and the cells of tables."""
        return super().render_str(visible(text), **how)
