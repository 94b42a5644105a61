"""The LightningModule `BRAINet`: Lightning's hooks around a `Predictor`."""
