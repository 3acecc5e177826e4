"""The cloud. `backend` sends requests, `response_reader` reads the responses, `error_mapping` translates failures."""
