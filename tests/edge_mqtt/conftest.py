from ..mosquitto import mosquitto

__all__ = ["mosquitto"]
