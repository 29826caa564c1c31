"""Benchmarks: each is a module to run with `python -m`, and writes one JSON file into benchmarks/results."""
