"""The fleet: checks of policies and cases, and the control plane that rolls policies and models out to devices."""
