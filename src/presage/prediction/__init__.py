"""From a graph and its costs to a prediction: the step as a program of the engine, its draws, and what they say."""
