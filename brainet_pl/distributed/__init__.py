"""Work that several processes share: collectives, and which samples a process has.

Imports `_utils` alone.
"""
