"""Audio, images and files in requests: `uploads` inserts uploaded files that a request names, `reading` extracts the
bytes of parts and inserts the encoders' results.
"""
