"""One identity for box, control plane and cloud gateways: device keys, tokens, revocation."""
