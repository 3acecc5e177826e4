"""The encoder graph of a request, the same on a device and in the cloud: `graph` runs a `branch` for each part,
`memory` remembers what was found, as `facts`, and `late` reads on after the request was answered. `speech_detection`
detects speech in live sessions."""
