"""The operators' page: rollouts with their verdicts, boxes, policies side by side, the audit log."""
