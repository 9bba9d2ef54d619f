"""Strategies: one rank's captured step becomes the step of many ranks. They know no times."""
