"""What the edit of embedding tables is made of: lookups and their gradients as a step has them (`lookups`), and the ops
of one lookup over joined tables (`ops`)."""
