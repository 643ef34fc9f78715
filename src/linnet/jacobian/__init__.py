"""`Linearization` and `Jacobian`: the network's derivative as a streamed linear operator."""
