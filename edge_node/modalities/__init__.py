"""Sound as a request of its own: `/v1/audio/*` (`entry`, `audio`), and what speaks (`speaker`, `sound`)."""
