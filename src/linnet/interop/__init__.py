"""linnet's kernel inside other libraries: `linnet.interop.gpytorch` and `linnet.interop.botorch`.

Import these modules by name: linnet imports neither. BoTorch is an optional extra, ``pip install 'linnet[botorch]'``.
"""
