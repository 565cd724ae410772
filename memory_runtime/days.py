"""Calendar arithmetic on ISO texts that are as exact as what was said: year, month, week or day."""

from __future__ import annotations

import calendar
from datetime import UTC, date, timedelta

from memory_runtime.schema import parse_time


def local_day(observed_at: str | None) -> date | None:
    """The day on the speaker's own calendar: the offset in the text counts, not the server's."""
    moment = parse_time(observed_at)
    return moment.date() if moment else None


def seconds_of(iso: str | None) -> float:
    """Seconds since 1970 of an ISO time; one without an offset counts as UTC, none as 1970."""
    moment = parse_time(iso, field_name="time")
    if moment is None:
        return 0.0
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def shift_month(day: date, months: int) -> tuple[int, int]:
    """Year and month some months away."""
    index = day.year * 12 + day.month - 1 + months
    return index // 12, index % 12 + 1


def week_iso(day: date) -> str:
    """The ISO week of a day, like 2026-W10."""
    year, week, _ = day.isocalendar()
    return f"{year:04d}-W{week:02d}"


def monday_of(day: date, weeks: int = 0) -> date:
    """Monday of the week of a day, or of one some weeks away."""
    return day - timedelta(days=day.weekday()) + timedelta(weeks=weeks)


def day_in(year: int, month: int, day: int) -> str | None:
    """A day as ISO text, or None where the calendar has no such day."""
    if not 1 <= month <= 12 or not 1 <= day <= calendar.monthrange(year, month)[1]:
        return None
    return f"{year:04d}-{month:02d}-{day:02d}"


def interval(iso: str) -> tuple[date, date]:
    """First and last day of a value of `date`: a day, week, month, year or interval.

    Raises:
        ValueError: The text is none of these.
    """
    if "/" in iso:
        first, _, last = iso.partition("/")
        return date.fromisoformat(first), date.fromisoformat(last)
    if "W" in iso:
        year, week = iso.split("-W")
        monday = date.fromisocalendar(int(year), int(week), 1)
        return monday, monday + timedelta(days=6)
    parts = [int(part) for part in iso.split("-")]
    if len(parts) == 1:
        return date(parts[0], 1, 1), date(parts[0], 12, 31)
    if len(parts) == 2:
        last_day = calendar.monthrange(parts[0], parts[1])[1]
        return date(parts[0], parts[1], 1), date(parts[0], parts[1], last_day)
    return date(*parts), date(*parts)
