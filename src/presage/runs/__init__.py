"""Whole runs: many steps, with failures, checkpoints, spares and a deadline."""
