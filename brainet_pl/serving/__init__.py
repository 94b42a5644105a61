"""An exported model at work: read its folder, prepare inputs, answer, serve over HTTP.

Imports `monitoring` and what lies below it, and never torch: numpy, onnxruntime and, for images, Pillow are enough.
"""

from brainet_pl.serving.folder import ExportedModel

__all__ = ["ExportedModel"]
