"""Measurements: `make bench` (engine.py), and `make validate` where there is a GPU (gpu.py)."""
