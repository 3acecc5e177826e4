"""Trains the router signals with numpy and writes them as ONNX or JSON; none of it needs torch.

`graded_answers` grades the device model's own answers; `quality` and `calibration` learn from them. `encoder` distils
the sentence encoder (`bert_to_onnx` makes its teacher).
"""
