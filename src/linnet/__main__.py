"""`python -m linnet`, and `torchrun -m linnet` for several processes."""

from __future__ import annotations

import atexit
import os
import sys

from linnet.cli import app


def main() -> None:
    """Run the command as the program of this process.

    Threads of torch.distributed may outlive their group. They abort some of the processes that take themselves down in
    the usual way, and the launcher then ends the others. So one of several processes leaves at once, when all is done.
    """
    try:
        app(prog_name="linnet")
    except SystemExit as error:
        if int(os.environ.get("WORLD_SIZE", 1)) == 1:
            raise
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.code if isinstance(error.code, int) else int(error.code is not None))


if __name__ == "__main__":
    main()
