"""What was computed, in milliseconds or so of an idle core: no clock, so searches end alike."""

_total = {"spent": 0.0, "cuts": 0.0}


def spend(units: float) -> None:
    _total["spent"] += units


def spent() -> float:
    return _total["spent"]


def over(until: float) -> bool:
    """Whether ``spent`` is past ``until``; then the search is cut short."""
    past = spent() > until
    _total["cuts"] += past
    return past


def cuts() -> float:
    return _total["cuts"]
