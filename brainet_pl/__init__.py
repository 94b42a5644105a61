"""BRAINet for PyTorch Lightning: heads whose wiring is learned from the data."""

__version__ = "0.1.0"
