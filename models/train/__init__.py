"""Training, distillation and export. The only place that imports torch, and only inside functions that need it
(install the extra `train`)."""
