"""Between database and journal: the changes of a commit, the tables' content in the journal's form, and a journal's
changes in the tables. Imported by index/sqlite alone."""
