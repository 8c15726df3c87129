"""A model that computes nothing: pages of a real model's shape, filled at the speed of memory, for measurements."""
