"""Signals of a policy: `collector` builds the snapshot, `device` reads the sensors, `estimators` the model."""
