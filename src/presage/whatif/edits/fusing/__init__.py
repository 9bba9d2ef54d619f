"""Fusing: a graph's ops as values and nodes, which of them one kernel can hold, and the graph of those kernels.

flow    the graph without in-place writes and views: values, and the nodes that make them (`lower`, `rules`)
cut     which values of the forward pass are kept for the backward pass, the others being computed again
inline  which values are written to memory at all
group   which nodes share a kernel
rebuild the graph of the kernels
"""
