"""Execution graphs as files: PyTorch ET and Chakra. What ran, on which tensors, mostly without times."""
