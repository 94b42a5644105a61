"""A fitted model as a graph or a folder that runs without torch."""
