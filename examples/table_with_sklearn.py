"""A table, scikit-learn's way: probabilities, sets with a promise, intervals, and rows that are unlike the others.

python examples/table_with_sklearn.py
"""

import numpy as np
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split

from brainet_pl import BRAINetClassifier, BRAINetRegressor

X, X_test, y, y_test = train_test_split(*load_breast_cancer(return_X_y=True), random_state=0)
model = BRAINetClassifier(random_state=0).fit(X, y)
sets = model.predict_set(X_test, level=0.95)
print(f"accuracy {model.score(X_test, y_test):.3f}")
print(f"sets hold the class {sets[np.arange(len(y_test)), y_test].mean():.3f}, mean size {sets.sum(1).mean():.2f}")
swapped = X_test[:, ::-1]  # the columns in another order: every number is possible, no row is
print(f"flagged as strange: {(model.known_p(X_test) <= 0.05).mean():.3f}, with columns swapped "
      f"{(model.known_p(swapped) <= 0.05).mean():.3f}")  # fmt: skip

X, X_test, y, y_test = train_test_split(*load_diabetes(return_X_y=True), random_state=0)
model = BRAINetRegressor(random_state=0).fit(X, y)
lower, upper = model.predict_interval(X_test, level=0.9).T
print(f"R² {model.score(X_test, y_test):.2f}; intervals hold {((lower <= y_test) & (y_test <= upper)).mean():.2f}")
