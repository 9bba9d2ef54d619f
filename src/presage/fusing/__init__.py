"""Kernel fusion: a graph's ops in SSA form, which of them share a kernel, and the graph of those kernels.

lower, rules  the graph as values that are written once and nodes that produce them; views and in-place writes are gone
dataflow      that form; which values are written to memory, which the forward pass saves (min cut), what is recomputed
grouping      which nodes share a kernel: Inductor's scheduler, and chains as hand-written kernels fuse them
externs       ops that stay kernels of a library: padded, or in autocast's dtype
rebuild       the graph of the fused kernels
"""
