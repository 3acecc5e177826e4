"""The signals that a policy reads: `collector` builds the snapshot, `device` reads the sensors, `estimators` computes
the learned signals.
"""
