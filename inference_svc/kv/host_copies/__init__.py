"""Copies between the host's memory and a GPU's: by threads, of rows that are sent ahead, of files."""
