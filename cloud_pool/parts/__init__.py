"""Audio, images and files in requests: encoder tiers (`encoders`) read them concurrently, and the results go into the
prompt as text (`request_parts`).
"""
