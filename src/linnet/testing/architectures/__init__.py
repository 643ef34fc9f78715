"""The zoo: every architecture that linnet's products are held against a dense Jacobian on."""

from __future__ import annotations

from linnet.testing.architectures import attention, conv, dense, norm, sequence, sharing, transformers
from linnet.testing.case import Case

_FILES = (dense, sharing, conv, norm, sequence, attention, transformers)


def zoo() -> dict[str, Case]:
    """Tiny architectures by name, nothing built yet.

    Each has tens to a few thousand parameters in float64, so that its dense Jacobian is instant. Cases
    with `needs` set build only where that package is installed.

    Example:
        >>> case = zoo()["conv2d_depthwise"]
        >>> case.dense(case.build(), case.data(3, 0)).shape
        torch.Size([6, 98])
    """
    cases = [case for file in _FILES for case in file.CASES]
    return {case.name: case for case in cases}
