"""Benchmarks: caches against each other on a model, and the checks and figures of one GPU.

`python -m memos_hf bench` is the command line of this package.
"""
