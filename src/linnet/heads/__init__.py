"""Door 4: `attach_head`, a head for labels that the network was not trained on."""

from linnet.heads.attach import Head, NetworkWithHead, attach_head, head_of, put_head
from linnet.heads.readout import Readout

__all__ = ["Head", "NetworkWithHead", "Readout", "attach_head", "head_of", "put_head"]
