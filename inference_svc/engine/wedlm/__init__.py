"""Decoding of models that fill a window of masks in each pass, several tokens at once."""
