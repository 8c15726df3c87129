"""`kvasir bench …`: the services' speed beside the speed of this machine's wire, disk and hash, in one run."""

import typer

from kvasir_bench.attention import report as attention_report
from kvasir_bench.commands import attention, engine, fleet, load, make_model, memory, memory_path, quality, store
from kvasir_bench.commands.paper.command import paper
from kvasir_bench.engine import report as engine_report
from kvasir_bench.fleet import report as fleet_report
from kvasir_bench.load import report as load_report
from kvasir_bench.memory_path import findings
from kvasir_bench.paper import report as paper_report
from kvasir_bench.quality import report as quality_report

app = typer.Typer(help="Measure, as ratios within one run.", no_args_is_help=True)
app.command("store")(store.store)
app.command("engine", epilog=engine_report.help_text())(engine.engine)
app.command("attention", epilog=attention_report.KEYS)(attention.attention)
app.command("quality", epilog=quality_report.KEYS)(quality.quality)
app.command("load", epilog=load_report.KEYS)(load.load)
app.command("memory-path", epilog=findings.KEYS)(memory_path.memory_path)
app.command("memory")(memory.memory)
app.command("paper", epilog=paper_report.KEYS)(paper)
app.command("fleet", epilog=fleet_report.KEYS)(fleet.fleet)
app.command("make-model")(make_model.make_model)
