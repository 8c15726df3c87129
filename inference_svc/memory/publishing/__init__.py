"""A memory's way to the store: blocks while a turn runs, the rest and the commit at its end."""
