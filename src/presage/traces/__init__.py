"""Traces in (Kineto, execution graphs, operation tables), replay and explanation of them, Perfetto JSON out."""
