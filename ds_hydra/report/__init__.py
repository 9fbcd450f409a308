"""What a run tells: step records, log lines, predicted against measured, figures of a run."""
