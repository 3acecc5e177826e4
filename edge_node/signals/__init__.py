"""What a policy can ask about: `collector` builds the snapshot, `probes` reads the device, `estimators` the model."""
