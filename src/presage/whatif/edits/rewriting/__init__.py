"""A step written anew with other types of numbers, other layouts or another attention: what such edits share.

`runs` cuts the old graph into what is treated as one and `draft` collects the new one; `retype` and `viewing` say what
each op makes of its new inputs, and `backprop` does the same backward; `attending`, `fusing` and `asked` know attention
and the casts of the user's code.
"""
