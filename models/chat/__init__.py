"""Chat templates: `template` renders messages to a prompt, `sandbox` is where an untrusted template runs."""
