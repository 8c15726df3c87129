"""Work that an open store does for itself: checks, collection, sums."""
