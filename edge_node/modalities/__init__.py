"""Sound, pictures and files in requests: which encoders this box has (`boxed`), the graph that runs them (`graph`), and
what they found (`facts`)."""
