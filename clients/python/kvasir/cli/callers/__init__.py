"""The commands about callers: tokens, audit, reload."""
