"""The road from an input to an answer, and Lightning's hooks around it.

Imports every room but `callbacks`, `datamodules`, `cli` and `sklearn`.
"""
