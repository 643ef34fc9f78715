"""Door 1: `TangentRegressor` and `TangentClassifier`."""
