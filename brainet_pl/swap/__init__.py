"""A BRAINet head in the place of a layer of a trained model, inside and outside of Lightning."""
