"""`python -m linnet`, and `torchrun -m linnet` for several processes."""

from linnet.cli import app

if __name__ == "__main__":
    app(prog_name="linnet")
