"""The device's sensors: temperature of the processor, whether it is throttled, power draw, charge of the battery.

Reads of sysfs and procfs are tolerant: a sensor may be gone, powered down or return garbage.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

# Zones that do not measure the processor: constants (Jetson's PMIC-Die always reads 100 °C), radios, batteries.
_IGNORED_ZONES = ("pmic", "thermal-fan-est", "iwlwifi", "int3400", "battery", "bat")
# hwmon chips of processors, for devices whose thermal zones omit them (AMD laptops) or that have no zones.
_CPU_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "scpi_sensors"})
_FREQUENCY_CAPS = ("processor", "cpufreq", "thermal-cpufreq", "thermal-devfreq", "devfreq")
_PLAUSIBLE_C = (-40.0, 150.0)
_LOWEST_TRIP_C = 40.0  # a lower passive trip point is a placeholder of the firmware
_PI_NOW = 0b1111  # get_throttled: under-voltage, frequency capped, throttled, soft limit; the high bits are history
_READ_BYTES = 16 * 1024
_WHOLE_DEVICE = ("VDD_IN", "POM_5V_IN", "5V_IN", "VIN")
_CHANNELS = (1, 2, 3)  # channels of an INA3221; in4..in7 are shunt voltages and their sum
_MAX_W = 1_000.0  # a higher reading is a broken sensor


class _Zone(msgspec.Struct, frozen=True):
    temperature: Path
    passive_c: float | None  # the lowest trip point at which the kernel throttles, °C


class ThermalSensors:
    """Thermal sensors: `scan` finds them, the other methods read them. Temperatures are °C; None without a sensor."""

    def __init__(self, root: Path) -> None:
        self._sys = root / "sys"
        self._zones: list[_Zone] = []
        self._chips: list[Path] = []
        self._alerts: list[Path] = []
        self._caps: list[Path] = []
        self._counters: list[Path] = []
        self._counts: dict[Path, float] = {}  # the last readings: a rise means that the device was throttled in between

    def scan(self) -> None:
        thermal = self._sys / "class" / "thermal"
        self._zones = [zone for path in list_dir(thermal, "thermal_zone*") if (zone := _zone_at(path))]
        self._chips = [
            temperature
            for chip in list_dir(self._sys / "class" / "hwmon", "hwmon*")
            if read_text(chip / "name") in _CPU_CHIPS
            for temperature in list_dir(chip, "temp*_input")
        ]
        self._alerts, self._caps = [], []
        for device in list_dir(thermal, "cooling_device*"):
            kind = (read_text(device / "type") or "").lower()
            # Jetson: set while the software throttles for heat. "hot-surface-alert" does not throttle.
            if kind.endswith("-throttle-alert"):
                self._alerts.append(device / "cur_state")
            elif kind.startswith(_FREQUENCY_CAPS):
                self._caps.append(device / "cur_state")
        self._counters = [
            # Jetson Orin: over-current and under-voltage events, each throttles the clocks in hardware.
            *list_dir(self._sys / "class" / "hwmon", "hwmon*/oc*_event_cnt"),
            *list_dir(self._sys / "devices" / "system" / "cpu", "cpu*/thermal_throttle/package_throttle_count"),
        ]

    def temperature_c(self) -> float | None:
        """Return the highest plausible reading of the processor's sensors."""
        low, high = _PLAUSIBLE_C
        paths = [*(zone.temperature for zone in self._zones), *self._chips]
        readings = [value / 1000 for path in paths if (value := read_number(path)) is not None]
        return max((value for value in readings if low < value < high), default=None)

    def throttled(self) -> bool | None:
        """Return whether heat or lack of power slows the processor down.

        1. Jetson's throttle alerts; 2. without them, frequency caps set by the thermal framework; 3. without either, a
        zone that has reached its passive trip point; and always 4. throttle counters that rose since the last call,
        5. a Raspberry Pi's firmware.
        """
        sources = [
            _any_set(self._alerts)  # (1)
            if self._alerts
            else _any_set(self._caps)  # (2)
            if self._caps
            else self._at_passive_trip(),  # (3)
            self._counters_rose(),  # (4)
            self._raspberry_pi(),  # (5)
        ]
        known = [throttled for throttled in sources if throttled is not None]
        return any(known) if known else None

    def throttles_c(self) -> float | None:
        """Return the lowest temperature at which the kernel slows the processor down."""
        return min((zone.passive_c for zone in self._zones if zone.passive_c is not None), default=None)

    def _at_passive_trip(self) -> bool | None:
        known = [
            value / 1000 >= zone.passive_c
            for zone in self._zones
            if zone.passive_c is not None and (value := read_number(zone.temperature)) is not None
        ]
        return any(known) if known else None

    def _counters_rose(self) -> bool | None:
        counts = {path: count for path in self._counters if (count := read_number(path)) is not None}
        rose = any(count > self._counts.get(path, count) for path, count in counts.items())
        self._counts = counts
        return rose if counts else None

    def _raspberry_pi(self) -> bool | None:
        text = read_text(self._sys / "devices" / "platform" / "soc" / "soc:firmware" / "get_throttled")
        try:
            return bool(int(text, 16) & _PI_NOW) if text else None
        except ValueError:
            return None


def _zone_at(path: Path) -> _Zone | None:
    kind = (read_text(path / "type") or "").lower()
    if kind.startswith(_IGNORED_ZONES):
        return None
    trips = [
        value / 1000
        for kind_path in list_dir(path, "trip_point_*_type")
        if read_text(kind_path) == "passive"
        and (value := read_number(kind_path.with_name(kind_path.name.replace("_type", "_temp")))) is not None
    ]
    passive_c = min((trip for trip in trips if trip >= _LOWEST_TRIP_C), default=None)
    return _Zone(temperature=path / "temp", passive_c=passive_c)


def _any_set(states: list[Path]) -> bool | None:
    known = [state > 0 for path in states if (state := read_number(path)) is not None]
    return any(known) if known else None


def read_text(path: Path) -> str | None:
    """Return the file's text without the newline, or None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode("ascii", "replace").strip("\x00 \t\r\n")
    except OSError:  # a sensor that is powered down answers EAGAIN, EIO or ENODEV
        return None


def read_number(path: Path) -> float | None:
    """Return the finite number in the file, or None."""
    text = read_text(path)
    try:
        number = float(text) if text else None
    except ValueError:
        return None
    return number if number is not None and math.isfinite(number) else None


def list_dir(path: Path, pattern: str) -> list[Path]:
    """Return the sorted matches of `pattern` below `path`; an empty list if it cannot be listed."""
    try:
        return sorted(path.glob(pattern))
    except OSError:
        return []


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
    """Power sensors: `scan` finds them, the other methods read them; None without a sensor.

    Jetson: Texas Instruments INA3221 monitors on I2C, three rails each, ``in<N>_label``, ``in<N>_input`` in mV and
    ``curr<N>_input`` in mA (kernel driver ina3221; JetPack 4's own: ``rail_name_<N>``, ``in_power<N>_input`` in mW).
    Orin Nano and NX have a rail for the whole module, VDD_IN. AGX Orin has none: its rails are added, which is an upper
    bound, since one rail may feed another. Thor measures its input with an INA238 (``power1_input`` in µW).
    """

    def __init__(self, root: Path) -> None:
        self._sys = root / "sys"
        self._rails: list[_Rail] = []
        self._batteries: list[Path] = []

    def scan(self) -> None:
        rails = _hwmon_rails(self._sys) + _iio_rails(self._sys)
        whole = [rail for rail in rails if rail.label in _WHOLE_DEVICE]
        self._rails = whole[:1] or rails
        self._batteries = [
            supply
            for supply in list_dir(self._sys / "class" / "power_supply", "*")
            # A wireless mouse has a battery too: its scope is "Device".
            if read_text(supply / "type") == "Battery" and read_text(supply / "scope") != "Device"
        ]

    def power_w(self) -> float | None:
        """Return the watts of the whole device or module; on a laptop, of its discharging batteries."""
        if self._rails:
            return _sum_of([rail.watts() for rail in self._rails])
        discharging = [path for path in self._batteries if read_text(path / "status") == "Discharging"]
        return _sum_of([_discharge_w(path) for path in discharging])

    def battery(self) -> float | None:
        """Return the charge, 0 to 1; the mean if there are several batteries."""
        levels = [level / 100 for path in self._batteries if (level := read_number(path / "capacity")) is not None]
        levels = [level for level in levels if 0 <= level <= 1]
        return sum(levels) / len(levels) if levels else None

    def battery_wh(self) -> float | None:
        """Return the watt-hours that the batteries hold when full, as their gauges have learned it."""
        return _sum_of([_full_wh(path) for path in self._batteries])

    def discharging(self) -> bool | None:
        """Return whether a battery feeds the device."""
        known = [status for path in self._batteries if (status := read_text(path / "status"))]
        return "Discharging" in known if known else None


def _sum_of(watts: list[float | None]) -> float | None:
    """Return the sum; None if a rail is missing, because a part of the power would be misleading."""
    known = [value for value in watts if value is not None]
    return sum(known) if known and len(known) == len(watts) else None


def _discharge_w(battery: Path) -> float | None:
    power = read_number(battery / "power_now")  # µW
    if power is not None:
        return _plausible(abs(power) / 1e6)
    current, voltage = read_number(battery / "current_now"), read_number(battery / "voltage_now")  # µA, µV
    return _plausible(abs(current * voltage) / 1e12) if current is not None and voltage is not None else None


def _full_wh(battery: Path) -> float | None:
    energy = read_number(battery / "energy_full")  # µWh
    if energy is None:
        charge, voltage = read_number(battery / "charge_full"), read_number(battery / "voltage_min_design")  # µAh, µV
        energy = None if charge is None or voltage is None else charge * voltage / 1e6
    return energy / 1e6 if energy is not None and energy > 0.0 else None


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
