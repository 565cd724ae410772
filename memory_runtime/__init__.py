"""Bartlett's memory runtime: the part that people embed. Standard library and numpy only."""
