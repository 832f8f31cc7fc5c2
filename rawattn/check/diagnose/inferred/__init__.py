"""Bugs that are read off somebody's answers, and planted to see whether they fit."""
