"""The part of jobs, asynchronous requests, that gateway and device share: states, submission, view, events. Pure."""
