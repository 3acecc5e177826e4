"""The probes read the sensors of different devices, and report unreadable ones as absent."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.edge_node.signals.device import RESCAN_S, CpuTimes, DeviceProbes
from causeway_server.edge_node.signals.sensors import read_number
from causeway_server.router.types import DeviceSignals

from . import devices

MIB = 2**20


def probes(root: Path, available: int = 2000 * MIB) -> DeviceProbes:
    return DeviceProbes(root, cpu_times=lambda: CpuTimes(0.0, 0.0), available_bytes=lambda: available)


def test_orin_nano_has_temperature_throttling_and_module_power(tmp_path: Path) -> None:
    """VDD_IN is the module's power, not the sum of the rails behind it; powered-down zones are skipped."""
    signals = probes(devices.plant(tmp_path, devices.orin_nano())).read(0.0)
    assert signals.temperature_c == pytest.approx(52.468)
    assert signals.throttled is False  # neither the hot-surface alert nor the fan throttles
    assert signals.power_w == pytest.approx(4.960 * 1.424)
    assert signals.battery is None


def test_a_jetson_throttle_alert_is_throttling(tmp_path: Path) -> None:
    """One alert is enough."""
    sensors = probes(devices.plant(tmp_path, devices.orin_nano(), devices.cooling(3, "gpu-throttle-alert", "1")))
    assert sensors.read(0.0).throttled is True
    devices.plant(tmp_path, devices.cooling(3, "gpu-throttle-alert", "0"))
    assert sensors.read(1.0).throttled is False


def test_over_current_events_count_as_throttling_only_while_they_rise(tmp_path: Path) -> None:
    """The counters count since boot; a rise since the last read matters, even across a rescan."""
    sensors = probes(devices.plant(tmp_path, devices.orin_nano()))
    assert sensors.read(0.0).throttled is False
    counter = {"sys/class/hwmon/hwmon3/oc3_event_cnt": "38"}
    devices.plant(tmp_path, counter)
    assert sensors.read(1.0).throttled is True
    assert sensors.read(2.0).throttled is False
    devices.plant(tmp_path, {"sys/class/hwmon/hwmon3/oc3_event_cnt": "39"})
    assert sensors.read(2.0 + RESCAN_S).throttled is True


def test_agx_orins_power_is_the_sum_of_its_rails(tmp_path: Path) -> None:
    """It has no rail for the whole module; each connected rail of both monitors counts once."""
    root = devices.plant(tmp_path, devices.agx_orin())
    link = root / "sys" / "class" / "hwmon" / "hwmon3"
    link.parent.mkdir(parents=True)
    link.symlink_to(root / "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3")
    signals = probes(root).read(0.0)
    assert signals.power_w == pytest.approx(3.2 + 0.8 + 4.5 + 0.5)
    assert signals.temperature_c == 61.0
    assert signals.throttled is None  # no source in this tree


def test_a_missing_rail_makes_the_power_unknown(tmp_path: Path) -> None:
    """Part of the rails is not the power of the device."""
    rail = "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3/curr2_input"
    assert probes(devices.plant(tmp_path, devices.agx_orin(), {rail: None})).read(0.0).power_w is None


def test_jetpack_4_has_power_and_temperature(tmp_path: Path) -> None:
    """The PMIC's constant 100 °C is ignored."""
    signals = probes(devices.plant(tmp_path, devices.jetson_nano_jetpack4())).read(0.0)
    assert (signals.power_w, signals.temperature_c) == (pytest.approx(2.15), 41.0)


def test_thors_input_monitor_is_the_power_of_the_whole_device(tmp_path: Path) -> None:
    """An INA238 measures the input in µW."""
    root = devices.plant(
        tmp_path,
        devices.ina3221("sys/class/hwmon/hwmon2", [("VDD_GPU", "5000", "1000"), None, None]),
        {"sys/class/hwmon/hwmon4/name": "ina238", "sys/class/hwmon/hwmon4/power1_input": "42500000"},
    )
    assert probes(root).read(0.0).power_w == pytest.approx(42.5)


def test_a_laptop_has_battery_charge_and_power(tmp_path: Path) -> None:
    """Two batteries are averaged, a mouse's battery is ignored; so are radios and firmware constants."""
    root = devices.plant(tmp_path, devices.laptop())
    sensors = probes(root)
    signals = sensors.read(0.0)
    assert signals.battery == pytest.approx(0.61)
    assert signals.power_w == pytest.approx(9.5 + 3.0)
    assert signals.temperature_c == 63.0
    assert signals.throttled is False
    for battery in ("BAT0", "BAT1"):
        devices.plant(root, {f"sys/class/power_supply/{battery}/status": "Charging"})
    assert sensors.read(1.0).power_w is None  # unknown on mains power


def test_a_frequency_cap_is_throttling(tmp_path: Path) -> None:
    root = devices.plant(tmp_path, devices.laptop(), devices.cooling(0, "Processor", "3"))
    assert probes(root).read(0.0).throttled is True


@pytest.mark.parametrize(("temperature", "throttled"), [("98900", False), ("99000", True)])
def test_a_zone_at_its_passive_trip_point_is_throttling_without_other_sources(
    tmp_path: Path, temperature: str, throttled: bool
) -> None:
    root = devices.plant(tmp_path, devices.zone(0, "cpu-thermal", temperature, passive="99000"))
    assert probes(root).read(0.0).throttled is throttled


def test_a_desktop_without_zones_uses_the_processors_hwmon_chip(tmp_path: Path) -> None:
    """The hotter disk is ignored."""
    assert probes(devices.plant(tmp_path, devices.amd_desktop())).read(0.0).temperature_c == 55.125


@pytest.mark.parametrize(("word", "throttled"), [("0", False), ("50000", False), ("50005", True), ("8", True)])
def test_a_raspberry_pis_firmware_reports_throttling(tmp_path: Path, word: str, throttled: bool) -> None:
    """Only the bits of the current state count, not the history bits."""
    assert probes(devices.plant(tmp_path, devices.raspberry_pi(word))).read(0.0).throttled is throttled


def test_a_container_without_sysfs_has_only_memory(tmp_path: Path) -> None:
    assert probes(tmp_path, available=512 * MIB).read(0.0) == DeviceSignals(memory_free_mb=512.0)


GARBAGE = ["", "hot", "nan", "inf", "-inf", "999999999", "-273151", "\xff\x00", "0x", "1e400", "1 2", None]


@pytest.mark.slow
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_any_file_makes_only_that_sensor_absent(tmp_path: Path, garbage: str | None) -> None:
    """Nothing is raised, and the other files are still read."""
    for make in (
        devices.orin_nano,
        devices.agx_orin,
        devices.jetson_nano_jetpack4,
        devices.laptop,
        devices.amd_desktop,
    ):
        root = devices.plant(tmp_path / make.__name__, make())
        for name, text in make().items():
            devices.plant(root, {name: garbage})
            signals = probes(root).read(0.0)
            assert signals.memory_free_mb == 2000.0
            assert signals.temperature_c is None or 0 < signals.temperature_c < 150
            assert signals.power_w is None or 0 <= signals.power_w < 3000
            assert signals.battery is None or 0 <= signals.battery <= 1
            devices.plant(root, {name: text})


@given(content=st.binary(max_size=64))
def test_any_bytes_are_a_number_or_nothing(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("sensor") / "temp"
    path.write_bytes(content)
    number = read_number(path)
    assert number is None or number == number


def test_a_sensor_that_appears_later_is_found(tmp_path: Path) -> None:
    """At the next scan."""
    sensors = probes(tmp_path)
    assert sensors.read(0.0).battery is None
    devices.plant(tmp_path, devices.laptop())
    assert sensors.read(RESCAN_S - 1).battery is None
    assert sensors.read(RESCAN_S).battery == pytest.approx(0.61)


def test_a_sensor_that_disappears_is_absent(tmp_path: Path) -> None:
    """The file existed at the scan and is gone at the read."""
    sensors = probes(devices.plant(tmp_path, devices.raspberry_pi("0")))
    assert sensors.read(0.0).temperature_c is not None
    (tmp_path / "sys/class/thermal/thermal_zone0/temp").unlink()
    assert sensors.read(1.0).temperature_c is None


@pytest.mark.parametrize("version", [devices.cgroup_1, devices.cgroup_2])
def test_a_cgroup_limit_bounds_free_memory(tmp_path: Path, version: object) -> None:
    """Page cache that can be reclaimed does not count as used."""
    tree = version("pod/device", str(1000 * MIB), str(700 * MIB), str(200 * MIB))  # type: ignore[operator]
    assert probes(devices.plant(tmp_path, tree)).read(0.0).memory_free_mb == 500.0


def test_the_tightest_of_nested_limits_applies(tmp_path: Path) -> None:
    inner = devices.cgroup_2("pod/device", str(4000 * MIB), "0")
    outer = devices.cgroup_2("pod", str(300 * MIB), str(100 * MIB))
    root = devices.plant(tmp_path, outer, inner)
    assert probes(root).read(0.0).memory_free_mb == 200.0


@pytest.mark.parametrize(
    "tree",
    [
        devices.cgroup_2("", "max", "1"),
        devices.cgroup_1("", "9223372036854771712", "1"),
        devices.cgroup_2("", "garbage", "1"),
        devices.cgroup_2("", "1000", "garbage"),
        {"proc/self/cgroup": "garbage"},
        {"proc/self/cgroup": None},
    ],
)
def test_without_a_readable_limit_the_systems_memory_counts(tmp_path: Path, tree: devices.Files) -> None:
    assert probes(devices.plant(tmp_path, tree)).read(0.0).memory_free_mb == 2000.0


def test_a_containers_host_path_falls_back_to_the_mount(tmp_path: Path) -> None:
    """Inside a container the path may be the host's; the mount itself is then our group."""
    root = devices.plant(
        tmp_path, devices.cgroup_2("", str(100 * MIB), str(60 * MIB)), {"proc/self/cgroup": "0::/../../docker/4f5e"}
    )
    assert probes(root).read(0.0).memory_free_mb == 40.0


def test_free_memory_is_never_negative(tmp_path: Path) -> None:
    root = devices.plant(tmp_path, devices.cgroup_2("", "100", "200"))
    assert probes(root).read(0.0).memory_free_mb == 0.0


def test_cpu_is_the_busy_share_since_the_last_read(tmp_path: Path) -> None:
    """Absent at first; an interval that is too short keeps the last value."""
    times = [CpuTimes(10, 100), CpuTimes(13, 104), CpuTimes(13.01, 104.02), CpuTimes(17, 108), CpuTimes(16, 112)]
    reads = iter(times)
    sensors = DeviceProbes(tmp_path, cpu_times=lambda: next(reads), available_bytes=lambda: 0)
    shares = [sensors.read(float(second)).cpu for second in range(len(times))]
    assert shares == [None, 0.75, 0.75, 1.0, 0.0]


def test_a_failing_source_is_absent(tmp_path: Path) -> None:
    """psutil may raise where /proc is not what it expects."""

    def broken() -> int:
        raise OSError("no /proc")

    def broken_times() -> CpuTimes:
        raise OSError("no /proc")

    assert DeviceProbes(tmp_path, cpu_times=broken_times, available_bytes=broken).read(0.0) == DeviceSignals()


def test_this_machine_can_be_read() -> None:
    """The real sources; at least memory is readable."""
    signals = DeviceProbes().read(0.0)
    assert signals.memory_free_mb is not None
    assert signals.memory_free_mb > 0
