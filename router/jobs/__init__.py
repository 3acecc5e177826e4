"""What gateway and device share of jobs, the asynchronous requests: states, submission, view, events. Pure."""
