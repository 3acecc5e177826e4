"""Backends that generate answers: `backend` is the interface, `engine` this device, `cloud` an OpenAI server."""
