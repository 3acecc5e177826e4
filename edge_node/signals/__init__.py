"""What a policy can ask about: `collector` builds the snapshot, `device` reads the sensors, `estimators` the model."""
