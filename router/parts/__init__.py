"""Sound and pictures in requests: `reading` gets their bytes out, `fusion` puts in what encoders made of them."""
