"""OpenAI's batches over jobs.

file_store    uploaded input files
batch_store   batches in Redis; `states` is the table of a batch's life
input_file    JSONL -> lines, or what is wrong with each
processor     validates batches, submits their lines as jobs, finishes them
output_file   output and error files, read from the jobs
views         OpenAI's file and batch objects
"""
