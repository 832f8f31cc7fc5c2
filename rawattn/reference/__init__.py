"""The mathematics of packed attention on NumPy or CuPy arrays.

``dense`` is attention and its gradient with all scores in memory, ``second`` the derivatives beyond
that, ``online`` attention and its tangent by tiles. ``sparse`` is attention to selected blocks of
keys with all its derivatives; ``blocks`` says which blocks a query sees, and which queries a block,
``selection`` which keys.

Everything else in rawattn is judged by these modules; they import nothing else of it.
"""
