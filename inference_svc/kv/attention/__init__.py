"""Attention over pages: few new queries read the stored rows of a sequence through its block table."""
