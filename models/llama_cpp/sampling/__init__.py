"""From one row of logits to text: sampler (bias, penalties, grammar, draw), json_schema (schemas as GBNF), text_stream
(tokens to text, stop strings), confidence (log-probabilities and the confidence of the first tokens)."""
