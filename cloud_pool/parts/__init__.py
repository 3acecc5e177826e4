"""Audio, images and files in requests: tiers that are encoders (`encoders`) read them side by side, and what they
found goes into the prompt as text (`request_parts`)."""
