"""Chat templates: `template` renders messages, which `conversation` adapts, in the `sandbox` of untrusted templates."""
