"""`make demo-fleet`: a control plane and real boxes; a good rollout, and a bad one that undoes itself."""
