"""The wire: requests checked, messages mapped to plain data and back. Only the composition root imports from here."""
