"""Turns that go to another engine while they speak: given away, taken in, and read on by their reader's token."""
