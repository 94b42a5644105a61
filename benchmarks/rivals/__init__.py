"""Heads to compare with that are no part of the library; each is known by its name once it is imported."""
