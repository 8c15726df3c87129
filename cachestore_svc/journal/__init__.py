"""The journal of commits beside the index, from which a lost index is built anew. No SQL."""
