"""Leading singular vectors of an operator that is known through its products."""

from linnet.linalg.svd.block_krylov import orthonormalize
from linnet.linalg.svd.truncated import Decomposition, TooFewComponents, low_rank

__all__ = ["Decomposition", "TooFewComponents", "low_rank", "orthonormalize"]
