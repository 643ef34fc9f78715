"""python -m linnet.testing.hostile [NAME ...]"""

import sys

from linnet.testing.hostile.judge import main

if __name__ == "__main__":
    sys.exit(main())
