"""Measures Kvasir: `kvasir bench …`, and the programs that it runs. Nothing that serves imports this package."""
