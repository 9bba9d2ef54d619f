"""Fitting of kernel models, host terms, collectives, lookups and noise. The runtime never imports it."""
