"""Which side is wrong, and which bug is it? ``diagnosis`` is the way in.

An answer is compared with the float64 attention of its question, and with that of every known bug
planted in it (``engine``): the bug whose results the answer reproduces down to rounding is named.
"""
