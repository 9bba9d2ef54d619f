"""Running a training step on this machine's GPU and timing it. Needs Python, torch and numpy only.

python -m presage.measure TRAIN.py [--predicted PRED.json] -- ARGUMENTS
python -m presage.measure FILE.py:FUNCTION [--arg K=V]... [--predicted PRED.json]
"""
