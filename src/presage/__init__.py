"""presage: how long machine-learning training will take, and how sure you can be."""
