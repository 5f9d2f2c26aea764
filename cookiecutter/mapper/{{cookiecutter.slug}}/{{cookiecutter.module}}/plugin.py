"""Declare the plugins of this package to RollArt, as listed in rollart.yaml."""

from rollart_core.contracts.hardware import HardwareMapperSpec
from rollart_core.plugins.hookspecs import hookimpl
from rollart_core.plugins.manifest import specs


@hookimpl
def rollart_hardware_mappers() -> list[HardwareMapperSpec]:
    """Return the hardware mappers of this package."""
    return specs(__package__, "hardware_mappers")
