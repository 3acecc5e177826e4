"""Worker processes: `messages` between both sides; the `child` runs the worker, the `parent` sends jobs."""
