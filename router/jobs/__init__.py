"""The part of asynchronous jobs that gateway and device share: states, submission, view, events. Pure."""
