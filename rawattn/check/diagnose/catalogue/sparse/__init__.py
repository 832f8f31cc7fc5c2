"""Bugs of block-sparse attention: what is selected, and how the lists of blocks are walked."""
