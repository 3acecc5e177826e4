"""The models on this device: `engines` has one engine per model, `backend` turns requests into sequences, `supervisor`
keeps the child alive.
"""
