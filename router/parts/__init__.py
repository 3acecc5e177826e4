"""Sound and pictures in requests: `uploads` puts in the files that it names (`upload_terms`: their terms),
`reading` gets the bytes of parts out, `fusion` puts in what encoders made of them."""
