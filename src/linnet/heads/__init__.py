"""Door 4: `attach_head`, a head for labels that the network was not trained on."""

from linnet.heads.attach import attach_head
from linnet.heads.network import Head, NetworkWithHead, Readout, describe_head, head_of, put_head, restore_head
from linnet.heads.readout import check_targets

__all__ = [
    "Head",
    "NetworkWithHead",
    "Readout",
    "attach_head",
    "check_targets",
    "describe_head",
    "head_of",
    "put_head",
    "restore_head",
]
