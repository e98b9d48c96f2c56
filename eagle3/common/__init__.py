"""What every stage shares: options, files, logs, locks, processes. Knows no engine and no torch."""
