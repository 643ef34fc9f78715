"""linnet inside other libraries: `linnet.interop.gpytorch`, `linnet.interop.botorch` and `linnet.interop.scikit_learn`.

Import these modules by name: linnet imports none of them. GPyTorch and BoTorch are extras, ``pip install
'linnet[gpytorch]'`` and ``pip install 'linnet[botorch]'``.
"""
