"""Espressif's ESP-DL on an ESP32-S3 or an ESP32: as on an ESP32-P4, but ties are rounded up."""

from dataclasses import replace

from qtrace.targets.esp_dl.backend import BACKEND as _P4

BACKEND = replace(
    _P4,
    name="esp_dl_s3",
    activation=_P4.activation.replace(rounding="half_up"),
    weight=_P4.weight.replace(rounding="half_up"),
    device="ESP32-S3",
)
