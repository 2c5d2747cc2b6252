"""Counts, shares and times as a terminal shows them."""


def count(number: int) -> str:
    """A count in short form: 355, 14.7 k, 1.4 M."""
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= 0.99995 * size:  # which one decimal rounds up to it
            return f"{number / size:.1f}{unit}"
    return str(number)


def percent(share: float) -> str:
    """A share in percent, with as many digits as it has: 95%, 99.5%."""
    return f"{100 * share:g}%"


def clock(seconds: float) -> str:
    """Seconds as a clock shows them: 4:20, 1:02:03."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
