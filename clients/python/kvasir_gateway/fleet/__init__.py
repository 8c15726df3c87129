"""Several engines of one store behind the gateway: which of them computes a turn."""
