"""What was computed, in milliseconds or so of an idle core: no clock, so searches end alike."""

_total = {"spent": 0.0, "cuts": 0.0}


def spend(units: float) -> None:
    _total["spent"] += units


def spent() -> float:
    """All units since the process began."""
    return _total["spent"]


def over(until: float) -> bool:
    """Whether ``spent`` is past ``until``; then the search is cut short."""
    past = spent() > until
    _total["cuts"] += past
    return past


def cuts() -> float:
    """How many searches have been cut short since the process began."""
    return _total["cuts"]
