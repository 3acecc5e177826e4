"""The `causeway-fleet` program: commands, their output, and the folder of policies that they read."""
