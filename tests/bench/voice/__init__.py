"""`make demo-voice`: spoken commands on the device, with the network watched for the whole run."""
