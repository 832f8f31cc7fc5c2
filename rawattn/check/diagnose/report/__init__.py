"""A diagnosis in words and as a page."""
