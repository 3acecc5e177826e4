"""The models on this device: `engines` keeps an engine child per model alive, `backend` turns requests into jobs."""
