"""Features of data: extracted in a fixed order, shared by processes, kept on disk under a name that tells them apart.

Imports `backbones`, `distributed` and `_utils`.
"""
