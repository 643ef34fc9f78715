"""linnet inside other libraries: models for GPyTorch, BoTorch and scikit-learn, callbacks for trainers.

Import the modules by name: `linnet.interop.gpytorch`, `botorch`, `scikit_learn`, `laplace_torch`, `lightning` and
`transformers`. linnet imports none of them. The libraries are extras, as in ``pip install 'linnet[botorch]'``.
"""
