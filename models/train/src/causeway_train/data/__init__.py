"""Training data: the `corpus`, and texts made from it (augmentation, invented values, paraphrases, pseudo-labels)."""
