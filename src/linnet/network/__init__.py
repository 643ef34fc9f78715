"""A module as a function of named parameters: its calls, copies, blocks and outputs."""

from linnet.network.batchnorm_folding import fold_batchnorm, unfoldable
from linnet.network.call_trace import ModuleCall, Trace, trace
from linnet.network.checks import (
    CannotCast,
    check_module,
    check_outputs_finite,
    check_same_shapes,
    close,
    examples_interact,
    output_tensor,
)
from linnet.network.copies import Forward, copy_sharing_parameters, with_forward
from linnet.network.depth import block_names, has_fitted_head, top_blocks
from linnet.network.flat_output import FlatOutput, unflattened
from linnet.network.functional_model import Autocast, FunctionalModel, Output, Watch, as_dtype, output_matrix
from linnet.network.parameter_guard import READERS, CallGuard, address, coarser
from linnet.network.parameters import Layout, Params, select
from linnet.network.plain_graph import find_input_tensors, trace_rows
from linnet.network.sharded import check_whole, lies_in_parts, whole

__all__ = [
    "READERS",
    "Autocast",
    "CallGuard",
    "CannotCast",
    "FlatOutput",
    "Forward",
    "FunctionalModel",
    "Layout",
    "ModuleCall",
    "Output",
    "Params",
    "Trace",
    "Watch",
    "address",
    "as_dtype",
    "block_names",
    "check_module",
    "check_outputs_finite",
    "check_same_shapes",
    "check_whole",
    "close",
    "coarser",
    "copy_sharing_parameters",
    "examples_interact",
    "find_input_tensors",
    "fold_batchnorm",
    "has_fitted_head",
    "lies_in_parts",
    "output_matrix",
    "output_tensor",
    "select",
    "top_blocks",
    "trace",
    "trace_rows",
    "unflattened",
    "unfoldable",
    "whole",
    "with_forward",
]
