"""The step plan, what makes it valid, and which schemes may run. Pure: no torch."""
