"""Singular values of trained runs' attention: `python run.py spectrum`."""
