"""The cloud. `backend` sends requests, `credentials` keeps its token, `response_reader` reads the responses,
`error_mapping` translates failures."""
