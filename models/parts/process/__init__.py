"""A worker in a child process: `messages` both sides exchange, `child` runs the worker, `parent` asks it."""
