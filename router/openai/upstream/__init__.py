"""OpenAI-compatible servers: what is sent to one and the values of its answer (`wire`), and the answer (`decode`)."""
