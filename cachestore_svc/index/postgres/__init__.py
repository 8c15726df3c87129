"""The catalog in PostgreSQL: the tables of SQLite's, by the same statements. Needs kvasir[fleet]."""
