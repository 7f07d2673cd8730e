"""Worlds are started when a test first needs them and end with the pytest run."""

from tests.harness import World


def pytest_sessionfinish() -> None:
    """Ends the worlds of this run."""
    World.close_all()
