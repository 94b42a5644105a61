"""The one engine that fits: samples by role, layers, structure, head, training, and what held-out data teaches."""
