"""Device signals from psutil and sysfs. `device` combines `thermal`, `power` and `memory`, which read by `sysfs`."""
