"""Validation: each claim, its loader and its error table (`presage accuracy`). The runtime never imports it."""
