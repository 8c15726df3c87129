"""Opening a data directory: the checks of a start, and the rebuilding of a lost index."""
