"""Model artifacts: finding and verifying them (artifact), reading GGUF metadata (gguf), and whether a model fits a
device's memory (fit)."""
