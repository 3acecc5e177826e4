"""Jobs of a device: acceptance, the outbox, sending, and its bad days."""
