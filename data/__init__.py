"""Fetches bases and builds datasets. It may import memory_runtime and nothing else of ours."""
