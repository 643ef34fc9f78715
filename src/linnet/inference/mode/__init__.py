"""The mode of a log-concave likelihood on a linear model: one loop in three spaces, and Adam for data that changes."""

from linnet.inference.mode.adam import TrainedMode, Training, check_only_map, train_by_adam
from linnet.inference.mode.line_search import LineSearch
from linnet.inference.mode.newton import Mode, function_space, pass_space, weight_space

__all__ = [
    "LineSearch",
    "Mode",
    "TrainedMode",
    "Training",
    "check_only_map",
    "function_space",
    "pass_space",
    "train_by_adam",
    "weight_space",
]
