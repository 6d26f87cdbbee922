"""The work of the commands audit, bench, doctor, evaluate, explain, load-test, predict, samples, scan and show."""
