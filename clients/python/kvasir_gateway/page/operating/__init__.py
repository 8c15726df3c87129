"""The operator's half of the page: what `kvasir` does with a home, by the same commands."""
