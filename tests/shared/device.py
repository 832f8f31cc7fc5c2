"""Which GPUs the tests are on."""


def device_count() -> int:
    """GPUs that there are, 0 without a usable one."""
    try:
        from cupy.cuda import is_available, runtime
    except ImportError:
        return 0
    return int(runtime.getDeviceCount()) if is_available() else 0


def device_arch() -> int:
    """Compute capability of device 0 as a number (90 for 9.0), 0 without a usable GPU."""
    if not device_count():
        return 0
    from cupy.cuda import Device

    return int(Device(0).compute_capability)
