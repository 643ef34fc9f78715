"""Park et al. 2023, TRAK: which training data made a prediction, judged by networks that are trained again."""
