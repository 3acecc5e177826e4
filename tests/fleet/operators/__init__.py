"""The operators' side of the control plane: controller, audit log, sign-in, HTTP interface, commands."""
