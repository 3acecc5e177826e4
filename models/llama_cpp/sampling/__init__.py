"""From one row of logits to text: sampler (bias, penalties, grammar, draw), grammar (compiled for the model's tokens),
text_stream (tokens to text, stop strings), confidence (log-probabilities and the confidence of the first tokens)."""
