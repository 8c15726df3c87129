"""The files of memories on their way to the store: blocks while a turn runs, the rest at its end."""
