"""Linear operators and their algebra, solves, preconditioners, SVD: knows no network and no data."""
