"""Which GPU the tests are on."""


def device_arch() -> int:
    """Compute capability of device 0 as a number (90 for 9.0), 0 without a usable GPU."""
    try:
        from cupy.cuda import Device, is_available
    except ImportError:
        return 0
    return int(Device(0).compute_capability) if is_available() else 0
