"""The commands of `kvasir bench`: options, and results as tables, JSON and pictures."""
