"""linnet's kernel inside other libraries: `linnet.interop.gpytorch` and `linnet.interop.botorch`.

Import these modules by name: linnet imports neither. Both libraries are extras, ``pip install 'linnet[gpytorch]'`` and
``pip install 'linnet[botorch]'``.
"""
