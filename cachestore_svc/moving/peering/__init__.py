"""The other stores: their clients here, and the bounds of each."""
