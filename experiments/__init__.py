"""One file per figure or table of the papers: `python -m experiments NAME` writes results/NAME."""
