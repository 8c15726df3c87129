"""Opening a data directory: what is looked at, and how a lost index is built anew."""
