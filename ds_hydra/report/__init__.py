"""Reports of a run: step records, log lines, predicted against measured times, figures."""
