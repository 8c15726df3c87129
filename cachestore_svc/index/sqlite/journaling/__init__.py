"""Between database and journal: a commit's changes, the tables in the journal's form, and the way back."""
