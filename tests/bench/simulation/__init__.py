"""A seeded simulation of a fleet: polls, reconnects, stages, verdicts and reverts of up to a million devices."""
