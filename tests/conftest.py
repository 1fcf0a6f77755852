"""What a run of the tests says about itself."""

from __future__ import annotations

from tests.kvstore.redisserver import version


def pytest_report_header() -> str:
    """Which Redis the store is tested with; without one the run ends here."""
    return f"redis: {version()}"
