"""linnet's kernel inside other libraries: `linnet.interop.gpytorch` and `linnet.interop.botorch`.

Neither is imported with linnet; BoTorch is an optional extra, ``pip install 'linnet[botorch]'``.
"""
