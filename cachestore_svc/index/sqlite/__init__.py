"""The index in SQLite: the only place with SQL."""
