"""Sound and pictures in requests: which encoders this box has (`boxed`), and the graph that runs them (`graph`)."""
