"""Distillation of any teacher with an OpenAI endpoint into a pretrained student: a GGUF of the llama or Qwen family.

run        the pipeline: answers, training, adapter, merged and quantised model, card
teacher    the teacher's answers, stored as they come
examples   which answers are learned, as tokens of the student
calls      labelled rows as examples: the device's function calls
network    the student in torch, with a LoRA adapter
row_states the states of rows below the adapter, computed once
trainer    the training of the adapter
adapter    the adapter as a GGUF, and merged into the student
"""
