"""Measuring a GPU: which ops on which shapes, how long their kernels took. Needs Python, torch and numpy only.

python -m presage_fit.calibrate --out PACK [--minutes M] [--family NAME]...
"""
