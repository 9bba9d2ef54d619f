"""Measured runs as tables: one row an operation, or one entry a microbatch. No kernels, no host events."""
