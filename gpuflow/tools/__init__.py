"""What the commands doctor, scan, show, explain, bench, samples and load-test run."""
