"""Chat templates: `template` adapts messages to a model's template and renders it in the `sandbox`."""
