"""Chat templates: `template` renders messages in a form that the template takes, in the `sandbox` of untrusted ones."""
