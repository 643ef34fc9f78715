"""Leading singular vectors of an operator that is only multiplied with."""
