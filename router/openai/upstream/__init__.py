"""The interface to OpenAI-compatible servers: request bodies and values of answers (`wire`), answers (`decode`)."""
