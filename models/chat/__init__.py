"""Chat templates: `template` adapts messages to a model's template and renders them, inside the `sandbox` for untrusted
templates.
"""
