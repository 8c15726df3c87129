"""`kvasir bench load`: turns that arrive at a rate of their own, and what they saw."""
