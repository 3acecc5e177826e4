"""Audio and images: decoders on hostile files, and the children that they run in."""
