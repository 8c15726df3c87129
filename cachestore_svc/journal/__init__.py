"""The journal of commits beside the index, from which a lost index is rebuilt. No SQL."""
