"""Fake sysfs trees with the documented layouts of real devices. A value of None is a file that cannot be read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Files = Mapping[str, str | None]


def plant(root: Path, *trees: Files) -> Path:
    """Write the files under `root`. None becomes a folder of that name, which fails to read like a dead sensor."""
    for tree in trees:
        for name, text in tree.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            if text is None:
                path.mkdir()
            else:
                path.write_text(f"{text}\n")
    return root


def zone(number: int, kind: str, millidegrees: str | None, passive: str = "") -> Files:
    at = f"sys/class/thermal/thermal_zone{number}"
    files: dict[str, str | None] = {f"{at}/type": kind, f"{at}/temp": millidegrees}
    if passive:
        files |= {f"{at}/trip_point_0_type": "passive", f"{at}/trip_point_0_temp": passive}
    return files


def cooling(number: int, kind: str, state: str | None) -> Files:
    at = f"sys/class/thermal/cooling_device{number}"
    return {f"{at}/type": kind, f"{at}/cur_state": state, f"{at}/max_state": "9"}


def ina3221(at: str, rails: list[tuple[str, str, str] | None]) -> Files:
    """Build an INA3221 monitor. `rails`: (label, mV, mA) per channel; None is a channel that is not connected."""
    files: dict[str, str | None] = {f"{at}/name": "ina3221", f"{at}/in7_label": "sum of shunt voltages"}
    for channel, rail in enumerate(rails, start=1):
        label, millivolts, milliamperes = rail or ("NC", "0", "0")
        files |= {
            f"{at}/in{channel}_label": label,
            f"{at}/in{channel}_input": millivolts,
            f"{at}/curr{channel}_input": milliamperes,
            f"{at}/in{channel + 3}_input": "12",  # shunt voltage in µV
        }
    return files


def orin_nano() -> Files:
    """Jetson Orin Nano, JetPack 6: an INA3221 with the whole module on channel 1; CV zones are powered down."""
    at = "sys/class/hwmon/hwmon1"
    names = ("cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2", "tj")
    temperatures: tuple[str | None, ...] = ("52468", "49156", None, None, None, "50031", "49937", "48968", "52468")
    files: dict[str, str | None] = {}
    for number, (name, value) in enumerate(zip(names, temperatures, strict=True)):
        files |= zone(number, f"{name}-thermal", value, passive="99000")
    alerts = ("cpu", "gpu", "cv0", "cv1", "cv2", "soc0", "soc1", "soc2")
    for number, name in enumerate(alerts, start=2):
        files |= cooling(number, f"{name}-throttle-alert", "0")
    files |= {
        **cooling(0, "pwm-fan", "3"),
        **cooling(1, "hot-surface-alert", "1"),
        **cooling(10, "cpufreq-cpu0", "0"),
        **ina3221(at, [("VDD_IN", "4960", "1424"), ("VDD_CPU_GPU_CV", "4960", "400"), ("VDD_SOC", "4960", "360")]),
        "sys/class/hwmon/hwmon0/name": "pwmfan",
        "sys/class/hwmon/hwmon3/name": "soctherm_oc",
        "sys/class/hwmon/hwmon3/oc1_event_cnt": "0",
        "sys/class/hwmon/hwmon3/oc3_event_cnt": "37",
        "sys/class/hwmon/hwmon3/oc3_throt_en": "1",
    }
    return files


def agx_orin() -> Files:
    """Jetson AGX Orin: two INA3221, no rail for the whole, two channels not connected."""
    return {
        **zone(0, "CPU-therm", "61000"),
        **zone(1, "GPU-therm", "58500"),
        **zone(8, "tj-therm", "61000"),
        **ina3221(
            "sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3",
            [("VDD_GPU_SOC", "5000", "640"), ("VDD_CPU_CV", "5000", "160"), ("VIN_SYS_5V0", "5000", "900")],
        ),
        **ina3221("sys/bus/i2c/drivers/ina3221/1-0041/hwmon/hwmon4", [None, ("VDDQ_VDD2_1V8AO", "5000", "100"), None]),
    }


def jetson_nano_jetpack4() -> Files:
    """The first Jetson Nano: the vendor's own driver, and a PMIC sensor that always reads 100 °C."""
    at = "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    return {
        **zone(0, "AO-therm", "41000"),
        **zone(1, "CPU-therm", "35500"),
        **zone(4, "PMIC-Die", "100000"),
        **zone(5, "thermal-fan-est", "35250"),
        f"{at}/rail_name_0": "POM_5V_IN",
        f"{at}/in_power0_input": "2150",
        f"{at}/rail_name_1": "POM_5V_GPU",
        f"{at}/in_power1_input": "160",
    }


def laptop() -> Files:
    """A laptop: ACPI and package zones, processors as cooling devices, two batteries and a mouse's battery."""
    supply = "sys/class/power_supply"
    return {
        **zone(0, "acpitz", "45000", passive="107000"),
        **zone(1, "INT3400 Thermal", "20000"),
        **zone(2, "iwlwifi_1", "99000"),
        **zone(3, "x86_pkg_temp", "63000", passive="0"),
        **cooling(0, "Processor", "0"),
        **cooling(1, "Fan", "2"),
        "sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count": "4",
        f"{supply}/AC/type": "Mains",
        f"{supply}/BAT0/type": "Battery",
        f"{supply}/BAT0/status": "Discharging",
        f"{supply}/BAT0/capacity": "81",
        f"{supply}/BAT0/power_now": "9500000",
        f"{supply}/BAT1/type": "Battery",
        f"{supply}/BAT1/status": "Discharging",
        f"{supply}/BAT1/capacity": "41",
        f"{supply}/BAT1/current_now": "250000",
        f"{supply}/BAT1/voltage_now": "12000000",
        f"{supply}/hidpp_battery_0/type": "Battery",
        f"{supply}/hidpp_battery_0/scope": "Device",
        f"{supply}/hidpp_battery_0/capacity": "5",
    }


def amd_desktop() -> Files:
    """No useful zone; the processor is an hwmon chip, beside a hotter disk that must be ignored."""
    return {
        "sys/class/hwmon/hwmon0/name": "nvme",
        "sys/class/hwmon/hwmon0/temp1_input": "71850",
        "sys/class/hwmon/hwmon1/name": "k10temp",
        "sys/class/hwmon/hwmon1/temp1_input": "55125",
        "sys/class/hwmon/hwmon1/temp3_input": "48000",
    }


def raspberry_pi(throttled: str) -> Files:
    return {**zone(0, "cpu-thermal", "60388"), "sys/devices/platform/soc/soc:firmware/get_throttled": throttled}


def cgroup_2(path: str, limit: str, usage: str, inactive_file: str = "0") -> Files:
    at = f"sys/fs/cgroup/{path}".rstrip("/")
    return {
        "proc/self/cgroup": f"0::/{path}",
        f"{at}/memory.max": limit,
        f"{at}/memory.high": "max",
        f"{at}/memory.current": usage,
        f"{at}/memory.stat": f"anon 1\nfile 2\ninactive_file {inactive_file}\nactive_file 3",
    }


def cgroup_1(path: str, limit: str, usage: str, inactive_file: str = "0") -> Files:
    at = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    return {
        "proc/self/cgroup": f"9:name=systemd:/\n4:memory:/{path}\n0::/",
        f"{at}/memory.limit_in_bytes": limit,
        f"{at}/memory.usage_in_bytes": usage,
        f"{at}/memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive_file}",
    }
