"""The jobs API over HTTP. `job_api` routes; `batches.batch_api` has the handlers of files and batches."""
