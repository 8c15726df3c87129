"""`kvasir bench engine`: the engine from within. `python -m kvasir_bench.engine` measures without a command line."""
