"""A question, and attention by steps that answers it, with a bug planted where one is asked for."""
