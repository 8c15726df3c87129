"""The wire: RPCs, their roles, and the threads that they run on. Only the composition root imports from here."""
