"""Mu et al. 2020: Gradients as Features for Deep Representation Learning."""
