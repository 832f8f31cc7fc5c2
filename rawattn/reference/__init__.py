"""The mathematics of packed attention on NumPy or CuPy arrays: ``dense`` whole, ``online`` tiled.

Everything else in rawattn is judged by these two modules; they import nothing else of it.
"""
