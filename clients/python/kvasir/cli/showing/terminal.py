"""Text of others for a terminal: what would move its cursor, colour it or turn its lines is shown as an escape."""

import re
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

# C0 and C1 but for newline and tab; and Unicode's marks that turn the direction of writing.
_HARMFUL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_WIDE = 10_000  # columns


def visible(text: str) -> str:
    """The text with `\\x1b` where it has the control character ESC, and so on. Newlines and tabs stay."""
    return _HARMFUL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class WrappedReply:
    """A reply that is written to standard output in parts. At a terminal a word that reaches its edge is moved to the
    next line."""

    def __init__(self) -> None:
        self._column = 0  # of the next character
        self._word = ""  # that the line ends with

    def write(self, text: str, *, is_dim: bool = False) -> None:
        text = visible(text)
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1
            text = "".join(self._placed(character, width) for character in text)
        sys.stdout.write(f"\x1b[2m{text}\x1b[22m" if is_dim else text)
        sys.stdout.flush()

    def _placed(self, character: str, width: int) -> str:
        cells = cell_len(character)
        if character in "\n\t" or (character == " " and self._column >= width):
            self._column = 0 if character != "\t" else self._column // 8 * 8 + 8
            self._word = ""
            return character if character == "\t" else "\n"
        is_apart = character == " " or cells > 1  # a line may end before or behind it
        moved, break_ = "", ""
        if self._column + cells > width:
            moved = self._word if cell_len(self._word) < self._column and not is_apart else ""
            break_ = "\b" * cell_len(moved) + ("\x1b[K" if moved else "") + "\n"
            self._column, self._word = cell_len(moved), moved
        self._column += cells
        self._word = "" if is_apart else self._word + character
        return break_ + moved + character


class PlainConsole(Console):
    """Shows text as it is: names, labels and memories may look like rich's markup, or hold control characters."""

    def __init__(self, **where: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **where)
        if not self.is_terminal and "width" not in where:
            # Rich would take 80, and a pipe's reader wants each row on one line.
            self.width = shutil.get_terminal_size((_WIDE, 0)).columns

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """A cell that is wider than its column goes on in the next line. Tables cut it, and names are copied."""
        if options is not None and options.overflow == "ellipsis":
            options = options.update(overflow="fold")
        return super().render(renderable, options)

    def render_str(self, text: str, **how: Any) -> Text:
        """Every text passes here: lines, and the cells of tables."""
        return super().render_str(visible(text), **how)
