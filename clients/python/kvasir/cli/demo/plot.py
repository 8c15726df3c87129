"""The demo's picture: time to first token against context length, cold, from the store, and hot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir.cli.talking.turn import TurnResult


@dataclass(frozen=True, slots=True)
class Timing:
    """Turns with one context, all asked the same kind of question."""

    cold: TurnResult
    warm: TurnResult
    hot: TurnResult

    @property
    def tokens(self) -> int:
        return self.warm.prompt_tokens

    @property
    def first_token_s(self) -> tuple[float, float, float]:
        return self.cold.first_token_s, self.warm.first_token_s, self.hot.first_token_s


def plot(timings: Sequence[Timing], path: Path, subtitle: str) -> None:
    """Write a PNG. Log scale, because cold and hot are far apart. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = [timing.tokens for timing in timings]
    lines = (
        ("cold: everything is computed again", "o", "#b3423a", -3),
        ("warm: from the store, after kill -9", "s", "#2f6f9f", 2),
        ("hot: still in the engine", "^", "#3f8f4f", -9),
    )
    by_line = zip(*(timing.first_token_s for timing in timings), strict=True)
    for (label, marker, colour, above), seconds in zip(lines, by_line, strict=True):
        axes.plot(tokens, seconds, marker=marker, color=colour, label=label)
        offset: Any = {"textcoords": "offset points", "xytext": (7, above)}
        axes.annotate(f"{seconds[-1]:.3g} s", (tokens[-1], seconds[-1]), color=colour, **offset)
    axes.set_yscale("log")
    axes.set_xlim(0, max(tokens) * 1.12)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("seconds to the first token")
    axes.set_title("An agent that remembers need not read everything again", loc="left", fontsize=11)
    axes.text(0, -0.17, subtitle, transform=axes.transAxes, fontsize=7, color="#555555")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)
