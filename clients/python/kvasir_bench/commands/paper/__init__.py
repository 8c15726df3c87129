"""How `kvasir bench paper` measures: its cases, which are those of other benches, and services of its own."""
