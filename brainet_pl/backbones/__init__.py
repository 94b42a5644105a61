"""Feature extractors: how a network is loaded, which layer is removed, which layers are read, and what comes out.

Imports `_utils` and `distributed`.
"""

from brainet_pl.backbones.extractor import Backbone, FeatureExtractor

__all__ = ["Backbone", "FeatureExtractor"]
