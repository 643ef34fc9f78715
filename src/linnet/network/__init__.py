"""A module as a function of its named parameters; which modules a forward pass calls; checks of the weights."""
