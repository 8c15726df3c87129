"""The demo's picture: time to first token against context length, cold, from the store, and hot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds to the first token after so many tokens of context, all asked the same kind of question."""

    tokens: int
    cold_s: float
    warm_s: float
    hot_s: float
    cold_cached_tokens: int
    warm_cached_tokens: int
    hot_cached_tokens: int


def plot(timings: Sequence[Timing], path: Path, subtitle: str) -> None:
    """Write a PNG. Log scale, because cold and hot are far apart. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tokens = [timing.tokens for timing in timings]
    for label, marker, colour, above, seconds in (
        ("cold: everything is computed again", "o", "#b3423a", -3, [timing.cold_s for timing in timings]),
        ("warm: from the store, after kill -9", "s", "#2f6f9f", 2, [timing.warm_s for timing in timings]),
        ("hot: still in the engine", "^", "#3f8f4f", -9, [timing.hot_s for timing in timings]),
    ):
        axes.plot(tokens, seconds, marker=marker, color=colour, label=label)
        axes.annotate(
            f"{seconds[-1]:.3g} s",
            (tokens[-1], seconds[-1]),
            textcoords="offset points",
            xytext=(7, above),
            color=colour,
        )
    axes.set_yscale("log")
    axes.set_xlim(0, max(tokens) * 1.12)
    axes.set_xlabel("tokens of context")
    axes.set_ylabel("seconds to the first token")
    axes.set_title("An agent that remembers need not read everything again", loc="left", fontsize=11)
    axes.text(0, -0.17, subtitle, transform=axes.transAxes, fontsize=7, color="#555555")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path)
