from tests.mosquitto import mosquitto

__all__ = ["mosquitto"]
