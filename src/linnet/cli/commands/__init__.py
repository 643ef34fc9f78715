"""What the `linnet` commands do; `linnet.cli` has their options.

`tables`, `images` and `texts` read files, `examples` picks one of them; `sources` makes networks; `targets` says what
is to be predicted; `planning` prints what will be done; `outputs` writes files and `publishing` makes them appear at
once; `runs` keeps what a later `predict` needs, and `trust` tells whose runs are whose.
"""
