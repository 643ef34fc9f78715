"""A byte for each line of the source, in a file that a test shares with the processes that it starts."""

import mmap
import os

hits: mmap.mmap | bytearray = bytearray(1 << 20)
if "MUTATE_HITS" in os.environ:
    with open(os.environ["MUTATE_HITS"], "r+b") as _file:
        hits = mmap.mmap(_file.fileno(), 0)
