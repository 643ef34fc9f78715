"""linnet beside laplace-torch, curvlinops and GPyTorch: the same jobs, one run; see `compare`."""
