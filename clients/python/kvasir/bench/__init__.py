"""Measurements of a whole Kvasir, as ratios within one run."""
