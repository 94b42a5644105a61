"""Feature extractors: how a network is loaded, which layer is removed, which layers are read, and what comes out.

Imports `_utils` and `distributed`.
"""

from brainet_pl.backbones.extractor import FeatureExtractor
from brainet_pl.backbones.loading import Backbone

__all__ = ["Backbone", "FeatureExtractor"]
