"""Measurements: `make bench` (__main__.py), and `make validate` where there is a GPU (gpu.py)."""
