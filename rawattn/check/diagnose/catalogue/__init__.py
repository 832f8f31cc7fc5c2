"""The bug classes, and the bugs that are listed: the forms that kernels have them in."""
