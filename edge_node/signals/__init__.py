"""The signals that a policy reads: `collector` (snapshot), `device` (sensors), `estimators` (learned ones)."""
