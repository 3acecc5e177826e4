"""The processor's temperature, and whether it is throttled."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .sysfs import list_dir, read_number, read_text

# Zones that do not measure the processor: constants (Jetson's PMIC-Die always reads 100 °C), radios, batteries.
_IGNORED_ZONES = ("pmic", "thermal-fan-est", "iwlwifi", "int3400", "battery", "bat")
# hwmon chips of processors, for boxes whose thermal zones omit them (AMD laptops) or that have no zones.
_CPU_CHIPS = frozenset({"coretemp", "k10temp", "zenpower", "cpu_thermal", "soc_thermal", "scpi_sensors"})
_FREQUENCY_CAPS = ("processor", "cpufreq", "thermal-cpufreq", "thermal-devfreq", "devfreq")
_PLAUSIBLE_C = (-40.0, 150.0)
_LOWEST_TRIP_C = 40.0  # a lower passive trip point is a placeholder of the firmware
_PI_NOW = 0b1111  # get_throttled: under-voltage, frequency capped, throttled, soft limit; the high bits are history


class _Zone(msgspec.Struct, frozen=True):
    temperature: Path
    passive_c: float | None  # the lowest trip point at which the kernel throttles


class ThermalSensors:
    """`scan` finds the sensors, the other methods read them. Temperatures are °C; None if there is no sensor."""

    def __init__(self, root: Path) -> None:
        self._sys = root / "sys"
        self._zones: list[_Zone] = []
        self._chips: list[Path] = []
        self._alerts: list[Path] = []
        self._caps: list[Path] = []
        self._counters: list[Path] = []
        self._counts: dict[Path, float] = {}  # the last readings: a rise means that the box was throttled in between

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

        1. Jetson's throttle alerts; 2. without them, frequency caps set by the thermal framework; 3. without either,
        a zone at its passive trip point; and always 4. throttle counters that rose since the last call,
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
