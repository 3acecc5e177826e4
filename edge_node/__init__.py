"""The daemon on the device, and the SDK client. Read `service` first: it is the table of hops in DESIGN."""
