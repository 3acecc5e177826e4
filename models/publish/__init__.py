"""Publishing of weights as artifacts: folders with weights, manifest and card.

Read `publish` first (manifest and card), then `add` (a user's own model or voice) and `check` (an unknown file).
"""
