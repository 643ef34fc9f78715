"""What all estimators share: inputs, files, the hub."""

from linnet._estimator import behavior, files
from linnet._estimator.behavior import draw_inputs
from linnet._estimator.class_uncertainty import ClassUncertaintyMixin
from linnet._estimator.dtypes import Dtypes, can_copy, make_jacobian, parse_dtype
from linnet._estimator.ensembles import EnsembleMixin, by_members, is_ensemble, members_of
from linnet._estimator.error_bars import ErrorBarsMixin, check_has_exact, check_variance
from linnet._estimator.exported import PredictiveModule, make_predictive_module
from linnet._estimator.files import load
from linnet._estimator.forgetting import example_codes, find_kept, take_parts
from linnet._estimator.hub import HubMixin
from linnet._estimator.inputs import (
    Counted,
    as_targets,
    check_inputs,
    convert_like,
    default_network,
    find_labeled,
    has_targets_in_memory,
    leave_out_ignored,
    leave_out_weightless,
    list_options,
    take_examples,
    warn_of_probabilities,
)
from linnet._estimator.labels import (
    as_labels,
    check_is_no_regression,
    find_better_order,
    find_codes,
    find_output_names,
    name_classes,
)
from linnet._estimator.linearity import Linearity
from linnet._estimator.optimizer_steps import epoch, shuffle
from linnet._estimator.source_data import WithSource, join_inputs

__all__ = [
    "ClassUncertaintyMixin",
    "Counted",
    "Dtypes",
    "EnsembleMixin",
    "ErrorBarsMixin",
    "HubMixin",
    "Linearity",
    "PredictiveModule",
    "WithSource",
    "as_labels",
    "as_targets",
    "behavior",
    "by_members",
    "can_copy",
    "check_has_exact",
    "check_inputs",
    "check_is_no_regression",
    "check_variance",
    "convert_like",
    "default_network",
    "draw_inputs",
    "epoch",
    "example_codes",
    "files",
    "find_better_order",
    "find_codes",
    "find_kept",
    "find_labeled",
    "find_output_names",
    "has_targets_in_memory",
    "is_ensemble",
    "join_inputs",
    "leave_out_ignored",
    "leave_out_weightless",
    "list_options",
    "load",
    "make_jacobian",
    "make_predictive_module",
    "members_of",
    "name_classes",
    "parse_dtype",
    "shuffle",
    "take_examples",
    "take_parts",
    "warn_of_probabilities",
]
