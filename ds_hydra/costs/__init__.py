"""Milliseconds and bytes of every parallel scheme: measured tables, their files, estimates. Pure: no torch."""
