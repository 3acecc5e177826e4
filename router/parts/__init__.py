"""Sound and pictures in requests: `reading` gets their bytes out, `fusion` puts the facts about them in."""
