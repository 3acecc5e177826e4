"""Sound as a request of its own: `/v1/audio/*` (`api`, `audio`), and what speaks (`speaker`, `voices`, `espeak`)."""
