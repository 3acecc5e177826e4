"""OpenAI's batches over jobs.

batch_api     /v1/files and /v1/batches over HTTP
input_file    JSONL -> lines, or what is wrong with each
processor     advances batches: checks the file, turns lines into jobs, and writes what came of them to the output files
"""
