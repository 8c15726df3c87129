"""The catalog in SQLite: the only place with SQL. Imported only where a data directory is opened or looked at."""
