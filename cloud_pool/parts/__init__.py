"""Audio, images and files: encoder tiers (`encoders`) read them, their text goes into the prompt (`request_parts`)."""
