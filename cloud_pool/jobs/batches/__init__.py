"""OpenAI's batches over jobs.

file_store    records, quotas and expiry of files; `content/` has their bytes
batch_store   batches in Redis; `states` is the table of a batch's life
input_file    JSONL -> lines, or what is wrong with each; input_reader reads them from the stored file
processor     advances batches: validation checks the file, expansion turns lines into jobs, collection writes what
              came of them to the output files, whose lines are output_file's
views         OpenAI's file and batch objects
"""
