"""Training losses in addition to next-token prediction. None of them changes the exported network.

`attention_loss` supervises where a copied token is read from, `tagging_loss` marks arguments in the prompt,
`embedding_loss` predicts a sentence encoder's vector, `function_distillation` learns from the soft labels of a
`function_teacher`, which is a published `bert` with one more layer.
"""
