"""`kvasir bench attention`."""

import typer
from kvasir.cli.caller import JsonOption, caller_of

from kvasir_bench.attention import report
from kvasir_bench.commands.shown import QuickOption, end, progress, show
from kvasir_bench.program import measured_by


def attention(context: typer.Context, quick: QuickOption = False, as_json: JsonOption = False) -> None:
    """Attention over quantized pages beside MLX's own and a copy. Ends with 1 when a target is missed.

    It needs a GPU: on a CPU it shows that everything works, and its times mean nothing."""
    caller = caller_of(context, as_json)
    with progress(caller, "measuring attention") as say:
        results = measured_by("attention", "attention could not be measured", {"--quick": quick}, say)
    show(caller, results, report)
    end(results, is_quick=False)  # a quick run has no targets
