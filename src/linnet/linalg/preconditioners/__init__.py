"""Matrices close to the matrix of a linear system, whose inverse is known."""

from linnet.linalg.preconditioners.low_rank import LowRankPreconditioner, Preconditioner
from linnet.linalg.preconditioners.nystrom import draw_landmarks, nystrom_preconditioner
from linnet.linalg.preconditioners.randomized import sketch
from linnet.linalg.preconditioners.woodbury import REFINED, WoodburyPreconditioner, woodbury_preconditioner

__all__ = [
    "REFINED",
    "LowRankPreconditioner",
    "Preconditioner",
    "WoodburyPreconditioner",
    "draw_landmarks",
    "nystrom_preconditioner",
    "sketch",
    "woodbury_preconditioner",
]
