"""What a checkpoint holds and how it is read, and the folder of the run that wrote it.

Imports `_utils` and `distributed`; what it describes (models, callbacks) imports it.
"""
