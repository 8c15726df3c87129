"""The demo's claims: each is printed with what was found, and one that does not hold fails the demo."""

from dataclasses import dataclass, field

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence, whether it held, and what was found."""

    text: str
    holds: bool
    found: str


@dataclass
class Claims:
    """Collects claims and prints each at once."""

    out: Console
    made: list[Claim] = field(default_factory=list)

    def check(self, text: str, holds: bool, found: str = "") -> None:
        """Claim `text`; `found` is shown in brackets."""
        self.made.append(Claim(text, holds, found))
        mark, style = ("✓", "green") if holds else ("✗ NOT TRUE:", "bold red")
        self.out.print(mark, style=style, end=" ")
        self.out.print(text + (f" ({found})" if found else ""))

    @property
    def broken(self) -> list[Claim]:
        return [claim for claim in self.made if not claim.holds]
