"""Heartbeats between ranks, and the end of the job on all of them when one cannot go on; start at `watchdog.py`."""

from ds_hydra.watchdog.host import EXIT_CODE
from ds_hydra.watchdog.watchdog import IDLE, Activity, Watchdog

__all__ = ["EXIT_CODE", "IDLE", "Activity", "Watchdog"]
