"""One identity for device, control plane and cloud gateways: device keys, tokens, revocation."""
