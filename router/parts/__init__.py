"""Audio and images in requests: `uploads` puts in the files that it names, `reading` gets the bytes of parts out, and
puts in what encoders made of them.
"""
