"""From an input to an answer: backbone, head, scores, calibration and verdict in one module.

Every door (Lightning, a swapped head, scikit-learn, an export) predicts by it.
"""
