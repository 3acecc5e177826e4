"""The box's power draw and its battery charge.

Jetson: Texas Instruments INA3221 monitors on I2C, three rails each, ``in<N>_label``, ``in<N>_input`` in mV and
``curr<N>_input`` in mA (kernel driver ina3221; JetPack 4's own driver: ``rail_name_<N>``, ``in_power<N>_input`` in mW).
Orin Nano and NX have a rail for the whole module, VDD_IN. AGX Orin has none: its rails are added, which is an upper
bound, since one rail may feed another. Thor measures its input with an INA238 (``power1_input`` in µW).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from .sysfs import list_dir, read_number, read_text

_WHOLE_BOX = ("VDD_IN", "POM_5V_IN", "5V_IN", "VIN")
_CHANNELS = (1, 2, 3)  # of an INA3221; in4..in7 are shunt voltages and their sum
_MAX_W = 1_000.0  # a higher reading is a broken sensor


class _Rail(msgspec.Struct, frozen=True):
    """A power rail: watts are the product of the files' values and `scale`."""

    label: str
    factors: tuple[Path, ...]
    scale: float

    def watts(self) -> float | None:
        product = self.scale
        for path in self.factors:
            value = read_number(path)
            if value is None:
                return None
            product *= value
        return _plausible(product)


class PowerSensors:
    """`scan` finds the sensors, the other methods read them; None if there is no sensor."""

    def __init__(self, root: Path) -> None:
        self._sys = root / "sys"
        self._rails: list[_Rail] = []
        self._batteries: list[Path] = []

    def scan(self) -> None:
        rails = _hwmon_rails(self._sys) + _iio_rails(self._sys)
        whole = [rail for rail in rails if rail.label in _WHOLE_BOX]
        self._rails = whole[:1] or rails
        self._batteries = [
            supply
            for supply in list_dir(self._sys / "class" / "power_supply", "*")
            # A wireless mouse has a battery too: its scope is "Device".
            if read_text(supply / "type") == "Battery" and read_text(supply / "scope") != "Device"
        ]

    def power_w(self) -> float | None:
        """Return the watts of the whole box or module; on a laptop, of its discharging batteries."""
        if self._rails:
            return _sum_of([rail.watts() for rail in self._rails])
        discharging = [path for path in self._batteries if read_text(path / "status") == "Discharging"]
        return _sum_of([_discharge_w(path) for path in discharging])

    def battery(self) -> float | None:
        """Return the charge, 0 to 1; the mean if there are several batteries."""
        levels = [level / 100 for path in self._batteries if (level := read_number(path / "capacity")) is not None]
        levels = [level for level in levels if 0 <= level <= 1]
        return sum(levels) / len(levels) if levels else None


def _sum_of(watts: list[float | None]) -> float | None:
    """Return the sum, or None if a rail is missing: part of the power is not a power reading."""
    known = [value for value in watts if value is not None]
    return sum(known) if known and len(known) == len(watts) else None


def _discharge_w(battery: Path) -> float | None:
    power = read_number(battery / "power_now")  # µW
    if power is not None:
        return _plausible(abs(power) / 1e6)
    current, voltage = read_number(battery / "current_now"), read_number(battery / "voltage_now")  # µA, µV
    return _plausible(abs(current * voltage) / 1e12) if current is not None and voltage is not None else None


def _plausible(watts: float) -> float | None:
    return watts if 0 <= watts <= _MAX_W else None


def _hwmon_rails(sys: Path) -> list[_Rail]:
    folders = {
        path.resolve(): path
        for path in (
            *list_dir(sys / "class" / "hwmon", "hwmon*"),
            *list_dir(sys / "bus" / "i2c" / "drivers" / "ina3221", "*/hwmon/hwmon*"),
        )
    }
    rails: list[_Rail] = []
    for folder in folders.values():
        name = read_text(folder / "name")
        if name == "ina3221":
            rails += [rail for channel in _CHANNELS if (rail := _channel(folder, channel))]
        elif name == "ina238" and (folder / "power1_input").exists():
            rails.append(_Rail("VIN", (folder / "power1_input",), 1e-6))
    return rails


def _channel(folder: Path, number: int) -> _Rail | None:
    label = read_text(folder / f"in{number}_label") or ""
    # NC: not connected (AGX Orin's second monitor); disabled channels answer ENODATA.
    if not label or label == "NC" or "shunt" in label or read_text(folder / f"in{number}_enable") == "0":
        return None
    return _Rail(label, (folder / f"in{number}_input", folder / f"curr{number}_input"), 1e-6)  # mV × mA


def _iio_rails(sys: Path) -> list[_Rail]:
    """Return the rails of JetPack 4, whose own driver is ``ina3221x``."""
    names = list_dir(sys / "bus" / "i2c" / "drivers" / "ina3221x", "*/iio:device*/rail_name_*")
    return [
        _Rail(label, (path.with_name(f"in_power{path.name.removeprefix('rail_name_')}_input"),), 1e-3)  # mW
        for path in names
        if (label := read_text(path)) and label != "NC"
    ]
