"""Benchmarks that anyone can rerun on data of their own."""
