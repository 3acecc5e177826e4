"""The network that is trained: llama in torch, its tokenizer, its optimizers, and its hand-set initial heads."""
