"""What the parts of an open store share: its state, and the work on stored blobs."""
