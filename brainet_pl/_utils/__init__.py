"""Small things that every room uses: checks of settings, parts by name, random states, atomic files, CSV cells,
Lightning's namespace.

Imports nothing of the package.
"""
