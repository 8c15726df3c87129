"""The database's file: its schema, its errors, and how it is read without a change."""
