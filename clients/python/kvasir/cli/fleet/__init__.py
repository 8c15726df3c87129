"""Several engines on one store: a store that runs elsewhere, and one that runs alone."""
