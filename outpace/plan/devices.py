"""Devices by their makers' figures; prices are assumed, rough market prices, or none."""

import re
from dataclasses import dataclass

GB, TB, T = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Device:
    """memory in bytes, bandwidth in bytes/s, flops of bfloat16 products a second, price in $ an hour,
    link to the other devices of its machine or slice in bytes/s one way."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    price: tuple[float, float] | None = None
    link: float | None = None
    tpu: bool = False


DEVICES = {
    device.name: device
    for device in (
        Device("h100", 80 * GB, 3.35 * TB, 989 * T, (1.9, 4.0), 450 * GB),
        Device("h200", 141 * GB, 4.8 * TB, 989 * T, (2.3, 5.0), 450 * GB),
        Device("b200", 180 * GB, 8.0 * TB, 2250 * T, (3.5, 7.0), 900 * GB),
        Device("v5e", 16 * GB, 0.819 * TB, 197 * T, link=200 * GB, tpu=True),
        Device("v5p", 95 * GB, 2.765 * TB, 459 * T, link=600 * GB, tpu=True),
        Device("v6e", 32 * GB, 1.638 * TB, 918 * T, link=400 * GB, tpu=True),
        Device("rtx-5090", 32 * GB, 1.79 * TB, 209 * T, (0.5, 1.0)),
        Device("rtx-4090", 24 * GB, 1.01 * TB, 165 * T, (0.3, 0.7)),
        Device("m3-ultra", 256 * GB, 0.819 * TB, 57 * T),
        Device("m4-max", 128 * GB, 0.546 * TB, 34 * T),
        Device("m4-max-32c", 36 * GB, 0.41 * TB, 27 * T),
        Device("dgx-spark", 128 * GB, 0.273 * TB, 125 * T),
        Device("strix-halo", 128 * GB, 0.256 * TB, 59 * T),
        Device("ddr5-2ch", 64 * GB, 0.0896 * TB, 2 * T),
        Device("epyc-12ch", 384 * GB, 0.461 * TB, 8 * T),
    )
}


def parse_hardware(text: str) -> tuple[int, str]:
    """ "8xh200" -> 8, "h200". Raises ValueError for a name that is not known, or no count."""
    match = re.fullmatch(r"(?:(\d+)x)?([a-z][a-z0-9-]*)", text.strip().lower())
    known = ", ".join((*DEVICES, "this"))
    if match is None or match[2] not in (*DEVICES, "this") or int(match[1] or 1) == 0:
        raise ValueError(f"hardware {text!r}: give a count and a name such as 8xh200; known are {known}")
    return int(match[1] or 1), match[2]
