"""Sounds, pictures and files in requests: tiers that are encoders (`encoders`) read them side by side, and what they
found goes into the prompt as text (`request_parts`), later where that revises the answer of a job (`late`);
`transcription_routes` is `/v1/audio/transcriptions`."""
