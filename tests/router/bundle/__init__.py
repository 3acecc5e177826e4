"""The format of bundles, the settings that a fleet may set, and who belongs to a rollout."""
