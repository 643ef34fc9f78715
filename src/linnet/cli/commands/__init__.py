"""The `linnet` commands. `linnet.cli` has their options, and passes them as a dict by name."""
