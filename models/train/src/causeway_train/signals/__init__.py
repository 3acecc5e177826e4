"""Training of the router signals with numpy. They are written as ONNX or JSON, and nothing here needs torch.

`graded_answers` grades the device model's own answers; `quality` and `calibration` learn from them. `encoder` distils
the sentence encoder (`bert_to_onnx` makes its teacher).
"""
