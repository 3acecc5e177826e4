"""OpenAI's batches, implemented by jobs.

batch_api     /v1/files and /v1/batches over HTTP
input_file    JSONL to lines, with the errors of each
processor     advances batches: checks the file, turns lines into jobs, and writes the outcomes to the output files
"""
