"""How far apart the GPUs of a fleet are: the usual ones, the slow ones, and how common slow ones are elsewhere."""
