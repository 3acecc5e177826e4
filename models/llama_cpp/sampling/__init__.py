"""From one row of logits to a token: sampler (bias, penalties, grammar, draw), grammar (compiled for the model's
tokens), confidence (log-probabilities and the confidence of the first tokens)."""
