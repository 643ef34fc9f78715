"""Door 4: `attach_head`, a head for labels that the network was not trained on."""

from linnet.heads.attach import attach_head
from linnet.heads.network import Head, NetworkWithHead, Readout, head_of, put_head

__all__ = ["Head", "NetworkWithHead", "Readout", "attach_head", "head_of", "put_head"]
