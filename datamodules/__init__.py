"""Lightning datamodules."""
