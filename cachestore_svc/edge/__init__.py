"""The wire: RPCs, their roles, and their messages. Only the composition root imports from here."""
