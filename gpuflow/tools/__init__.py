"""What the commands doctor, scan, explain, bench, samples and load-test run."""

__all__: list[str] = []
