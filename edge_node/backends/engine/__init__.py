"""The models on this device: one engine each (`engines`), sequences (`backend`), the child (`supervisor`)."""
