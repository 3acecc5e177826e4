"""Piper voices that an owner adds: `files`, text to `phonemes`, phonemes to sound (`synthesizer`, in a child)."""
