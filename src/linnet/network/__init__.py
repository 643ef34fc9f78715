"""A module as a function of named parameters: its calls, copies, blocks and outputs."""

from linnet.network.batchnorm_folding import fold_batchnorm, unfoldable
from linnet.network.call_trace import ModuleCall, Trace, trace
from linnet.network.copies import Forward, copy_sharing_parameters, with_forward
from linnet.network.depth import block_names, top_blocks
from linnet.network.flat_output import FlatOutput, unflattened
from linnet.network.functional_model import Output, as_dtype
from linnet.network.parameters import Layout, Params, select

__all__ = [
    "FlatOutput",
    "Forward",
    "Layout",
    "ModuleCall",
    "Output",
    "Params",
    "Trace",
    "as_dtype",
    "block_names",
    "copy_sharing_parameters",
    "fold_batchnorm",
    "select",
    "top_blocks",
    "trace",
    "unflattened",
    "unfoldable",
    "with_forward",
]
