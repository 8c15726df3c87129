"""One program of steps that the client of every language goes through, against live services."""
