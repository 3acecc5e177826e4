"""OpenAI's batches over jobs.

batch_api     /v1/files and /v1/batches over HTTP
input_file    JSONL -> lines, or what is wrong with each; input_reader reads them from the stored file
processor     advances batches: validation checks the file, expansion turns lines into jobs, collection writes what
              came of them to the output files, whose lines are output_file's
views         OpenAI's file and batch objects
"""
