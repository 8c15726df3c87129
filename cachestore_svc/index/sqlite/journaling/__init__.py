"""Where database and journal meet: what a commit changed, what the tables say in the journal's words, and a journal
written back. Imported from index/sqlite alone."""
