"""Messages, memory, torch settings, ranks, progress, atomic files: knows nothing of the mathematics."""

from linnet._common import files, messages
from linnet._common.checkpoint import Checkpoint, check_folder, remove_checkpoints
from linnet._common.checksums import combine_codes, row_codes, tensor_code, text_code
from linnet._common.deferred import Deferred
from linnet._common.distributed import ALONE, Ranks, is_sharded, shard, share_out, together
from linnet._common.files import atomic_write, sync
from linnet._common.memory import TEMPORARY, check_fits, find_budget, find_dense_budget, format_bytes, free_memory
from linnet._common.messages import check_samples, kind, listing
from linnet._common.progress import Tick, show_progress
from linnet._common.torch_settings import (
    Precision,
    arithmetic,
    check_precision,
    dual_level,
    forward_mode,
    full_precision,
    module_lock,
    network_precision,
    network_settings,
    noting_saved_tensors,
    packing_saved_tensors,
    saved_tensor_hooks,
    without_scripting_warnings,
    without_transforms,
)
from linnet._common.versions import MissingExtra, __version__, find_versions, needs_extra

__all__ = [
    "ALONE",
    "TEMPORARY",
    "Checkpoint",
    "Deferred",
    "MissingExtra",
    "Precision",
    "Ranks",
    "Tick",
    "__version__",
    "arithmetic",
    "atomic_write",
    "check_fits",
    "check_folder",
    "check_precision",
    "check_samples",
    "combine_codes",
    "dual_level",
    "files",
    "find_budget",
    "find_dense_budget",
    "find_versions",
    "format_bytes",
    "forward_mode",
    "free_memory",
    "full_precision",
    "is_sharded",
    "kind",
    "listing",
    "messages",
    "module_lock",
    "needs_extra",
    "network_precision",
    "network_settings",
    "noting_saved_tensors",
    "packing_saved_tensors",
    "remove_checkpoints",
    "row_codes",
    "saved_tensor_hooks",
    "shard",
    "share_out",
    "show_progress",
    "sync",
    "tensor_code",
    "text_code",
    "together",
    "without_scripting_warnings",
    "without_transforms",
]
