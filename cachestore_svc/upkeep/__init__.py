"""What an open store does for itself: checks, collection, and files set aside."""
